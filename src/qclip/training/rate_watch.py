"""The rate watch: notices a scheduler that steps at every physical batch instead of every logical one."""

import warnings
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


class RateWatch:
    """Notices learning rates that move inside a logical batch, where no optimizer step can use them.

    Args:
        optimizers: The optimizers of the run.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._last: list[float] = []
        self._moved = self._warned = False

    def see(self, position: int) -> None:
        """Look at the learning rates before the physical batch at this position of its logical batch."""
        # A tensor's version stands for its value, which a GPU would have to wait for.
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        rates = [rate._version if isinstance(rate := group["lr"], Tensor) else float(rate) for group in groups]
        self._moved |= position > 0 and rates != self._last
        self._last = rates

    def warn(self, stacklevel: int) -> None:
        """Warn once if they moved."""
        if self._moved and not self._warned:
            self._warned = True
            warnings.warn(
                "the learning rate changed between two physical batches of one logical batch, as if by a scheduler "
                "that steps too often: call scheduler.step() only when training.updated is True",
                stacklevel=stacklevel + 1,
            )

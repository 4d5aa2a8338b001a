"""Random numbers: every generator a forward pass may draw from, remembered and replayed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class RandomState:
    """The states of torch's generators (the CPU's and the device's), Python's and numpy's."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device
    python: Any
    numpy: Any

    @staticmethod
    def now(device: torch.device) -> "RandomState":
        """As they are."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(torch.get_rng_state(), cuda, device, random.getstate(), np.random.get_state())  # noqa: NPY002

    def restore(self) -> None:
        """Make them what they were."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def unmoved(self) -> bool:
        """Whether torch's generators still are where they were."""
        same = torch.equal(self.cpu, torch.get_rng_state())
        return same and (self.cuda is None or torch.equal(self.cuda, torch.cuda.get_rng_state(self.device)))

    def python_unmoved(self) -> bool:
        """Whether Python's and numpy's generators still are where they were."""
        now = np.random.get_state()  # noqa: NPY002
        same = all(np.array_equal(a, b) for a, b in zip(self.numpy, now, strict=True))
        return same and self.python == random.getstate()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run with the generators as they were, and put them back as they are."""
        present = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            present.restore()


def seed_all(seed: int) -> None:
    """Seed the generators that a data set may draw from: torch's on the CPU, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


_T = torch.Tensor
_DRAWS = {
    torch.randn, torch.rand, torch.randint, torch.randn_like, torch.rand_like, torch.randint_like, torch.normal,
    torch.poisson, torch.bernoulli, _T.bernoulli, _T.bernoulli_, _T.normal_, _T.uniform_, _T.exponential_, _T.random_,
}  # fmt: skip


class SameDraws(TorchFunctionMode):
    """Random numbers that do not depend on the size of the batch: every example gets those of the first.

    A first pass, on a batch of ``batch_size``, draws and remembers; a second, on another, is given what was ``drawn``
    and leaves the generators where they are.
    """

    def __init__(self, batch_size: int, device: torch.device, drawn: list[Tensor] | None = None) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self._device = device
        self._batch_size = batch_size
        self._given = None if drawn is None else iter(drawn)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Draw, and give all examples what the first one got."""
        kwargs = kwargs or {}
        if func not in _DRAWS:
            return func(*args, **kwargs)
        before = RandomState.now(self._device)
        result = func(*args, **kwargs)
        if self._given is None:
            row = result.detach()
            for dim, length in enumerate(row.shape):
                row = row.narrow(dim, 0, 1) if length == self._batch_size else row
            self.drawn.append(row.clone())
        else:
            row = next(self._given, result.detach())
        try:
            same = row.expand_as(result)
        except RuntimeError:  # not drawn for this place; the moved generator says that the passes cannot be compared
            return result
        if self._given is not None:
            before.restore()
        with torch.no_grad():
            return result.copy_(same)

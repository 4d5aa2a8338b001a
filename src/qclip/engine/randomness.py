"""Random numbers: every generator a forward pass may draw from, remembered and replayed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


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

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run with the generators as they were, and put them back as they are."""
        present = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            present.restore()

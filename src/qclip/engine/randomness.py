"""Random numbers: the states of all generators that a forward pass or a data set may draw from, saved and replayed."""

import itertools
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class RandomState:
    """The states of the global generators of torch (CPU and CUDA), Python and numpy."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    """The state of ``device``, or of every CUDA device where ``device`` is None."""
    device: torch.device | None
    python: Any
    numpy: Any

    @staticmethod
    def now(device: torch.device | None = None) -> "RandomState":
        """Return the current states: of the CPU and this device, or of the CPU and every CUDA device."""
        return RandomState(torch.get_rng_state(), _cuda_states(device), device, random.getstate(), _numpy_state())

    def restore(self) -> None:
        """Set the generators to these states; those of all CUDA devices only if there are as many devices."""
        torch.set_rng_state(self.cpu)
        if self.device is not None and self.cuda:
            torch.cuda.set_rng_state(self.cuda[0], self.device)
        elif self.cuda and len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002

    def unmoved(self) -> bool:
        """Return whether torch's generators are still in these states."""
        states = (torch.get_rng_state(), *_cuda_states(self.device))
        return all(map(torch.equal, (self.cpu, *self.cuda), states))

    def python_unmoved(self) -> bool:
        """Return whether Python's and numpy's generators are still in these states."""
        same = all(np.array_equal(a, b) for a, b in zip(self.numpy, _numpy_state(), strict=True))
        return same and self.python == random.getstate()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run with these states, and restore the current ones on exit."""
        present = RandomState.now(self.device)
        self.restore()
        try:
            yield
        finally:
            present.restore()

    @contextmanager
    def seeded(self, number: int) -> Iterator[None]:
        """Run with states that follow from these and a number, and restore the current ones on exit."""
        with self.replayed():
            seed = int(torch.randint(2**31, ())) + number
            seed_all(seed)
            if self.device is not None and self.cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the states as plain data, for a checkpoint."""
        name, keys, *rest = self.numpy
        return {
            "torch": self.cpu,
            "cuda": list(self.cuda),
            "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
            "python": self.python,
        }

    @staticmethod
    def from_state_dict(states: Mapping[str, Any]) -> "RandomState":
        """Return the states that `state_dict` gave for every device; its tensors may have moved to another device."""
        name, keys, *rest = states["numpy"]
        numpy_state = (name, keys.cpu().numpy().astype(np.uint32), *rest)
        cuda = tuple(state.cpu() for state in states["cuda"])
        return RandomState(states["torch"].cpu(), cuda, None, states["python"], numpy_state)


def _cuda_states(device: torch.device | None) -> tuple[Tensor, ...]:
    if device is None:
        return tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
    return (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()


def _numpy_state() -> Any:
    return np.random.get_state(legacy=True)  # noqa: NPY002 - a data set may use the global generator


def seed_all(seed: int) -> None:
    """Seed the generators that a data set may draw from: torch's on the CPU, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


_SETTINGS = {"seed", "get_state", "set_state", "getstate", "setstate"}


@contextmanager
def drawn_call_by_call() -> Iterator[None]:
    """Seed the generators of Python and numpy before each call, by their present states and the number of the call.

    Models draw from them in a loop over the examples, such as masks of SpecAugment, and how many numbers a call takes
    may depend on its example. From one stream, replacing an example would change what is drawn for all that follow.
    """
    owner = threading.get_ident()
    first = int(random.getstate()[1][0]), int(_numpy_state()[1][0])
    counts = {random: itertools.count(), np.random: itertools.count()}

    def instead_of(draw: Any, module: Any) -> Any:
        def draw_anew(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == owner:
                _seed(module, (*first, next(counts[module])))
            return draw(*args, **kwargs)

        return draw_anew

    own = {
        (module, name): draw
        for module, generator in ((random, random._inst), (np.random, np.random.mtrand._rand))
        for name, draw in vars(module).items()
        if getattr(draw, "__self__", None) is generator and name not in _SETTINGS
    }
    try:
        for (module, name), draw in own.items():
            setattr(module, name, instead_of(draw, module))
        yield
    finally:
        for (module, name), draw in own.items():
            setattr(module, name, draw)


def _seed(module: Any, seed: tuple[int, ...]) -> None:
    """Seed the generator of the module ``random`` or ``np.random``."""
    random.seed(repr(seed)) if module is random else np.random.seed(seed)  # noqa: NPY002


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class NoDropout(TorchFunctionMode):
    """A mode in which dropout does nothing, though the model stays in training mode."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Return the input of a dropout, and leave dropout out of attention."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
            args = (*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()))
        return func(*args, **kwargs)


_T = torch.Tensor
_DRAWS = {
    torch.randn, torch.rand, torch.randint, torch.randn_like, torch.rand_like, torch.randint_like, torch.normal,
    torch.poisson, torch.bernoulli, _T.bernoulli, _T.bernoulli_, _T.normal_, _T.uniform_, _T.exponential_, _T.random_,
}  # fmt: skip


class SameDraws(TorchFunctionMode):
    """A mode in which every example draws the first example's random numbers, so that the batch size does not matter.

    Args:
        batch_size: B. Every dimension of this length is taken for the batch.
        device: Where the model draws.
        drawn: The draws that an earlier pass recorded. They are replayed, and the generators stay where they are.
    """

    def __init__(self, batch_size: int, device: torch.device, drawn: list[Tensor] | None = None) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self._device = device
        self._batch_size = batch_size
        self._recorded = None if drawn is None else iter(drawn)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Draw, and copy the first example's numbers to all examples."""
        kwargs = kwargs or {}
        if func not in _DRAWS:
            return func(*args, **kwargs)
        before = RandomState.now(self._device)
        result = func(*args, **kwargs)
        if self._recorded is None:
            row = result.detach()
            for dim, length in enumerate(row.shape):
                row = row.narrow(dim, 0, 1) if length == self._batch_size else row
            self.drawn.append(row.clone())
        else:
            row = next(self._recorded, result.detach())
        try:
            same = row.expand_as(result)
        except RuntimeError:  # recorded for another draw; the moved generator shows that the passes do not compare
            return result
        if self._recorded is not None:
            before.restore()
        with torch.no_grad():
            return result.copy_(same)

"""Repeatable kernels: what gives the same twice on a GPU, where proofs compare one run with another.

Other kernels add up in whatever order they get to it. In 16 bits that grows from layer to layer, until it looks as if
examples were mixed.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch

from qclip._validate import Refusal
from qclip.engine import tf32

T = TypeVar("T")

PREFER: Final = 1
"""Torch's level "warn": repeatable kernels but for what has none, and but for attention."""
INSIST: Final = 2
"""Torch's level "error": attention too; what has no such kernel fails, in whichever thread it runs."""

_one_at_a_time: Final = threading.RLock()
_chosen: int | None = None


def chosen() -> int:
    """Torch's level of determinism: as it was chosen, also while something is computed `repeatably`."""
    level = _chosen  # which another thread may change
    return torch.get_deterministic_debug_mode() if level is None else level


def repeatably(device: torch.device, compute: Callable[[], T]) -> T:
    """What this computes without TF32 and, on a GPU, by repeatable kernels.

    Where that is refused, it is computed again and such kernels are insisted on: only then, since another thread might
    need others at that moment.
    """
    with tf32.off():
        if device.type != "cuda":
            return compute()
        try:
            with _kernels(PREFER):
                return compute()
        except Refusal as refusal:
            if chosen() >= INSIST:
                raise
            try:
                with _kernels(INSIST):
                    return compute()
            except torch.OutOfMemoryError:
                raise
            except (Refusal, RuntimeError) as error:  # the latter where something has no such kernel
                raise refusal from error


@contextmanager
def _kernels(least: int) -> Iterator[None]:
    """At least this level, for all threads: torch has one for them all."""
    global _chosen  # noqa: PLW0603 - torch's setting is global
    memory: Any = torch.utils.deterministic
    with _one_at_a_time:
        outer, level, fills = _chosen, torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
        if level >= least:
            yield
            return
        _chosen = chosen()
        try:
            memory.fill_uninitialized_memory = False
            torch.set_deterministic_debug_mode(least)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*deterministic")
                yield
        finally:
            torch.set_deterministic_debug_mode(level)
            memory.fill_uninitialized_memory = fills
            _chosen = outer

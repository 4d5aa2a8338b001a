"""Torch's global settings: TF32, deterministic kernels, compilation, and the versions that qclip was tested with.

Torch has one of each for all threads. `SharedContext` lets several threads change one at the same time.
"""

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

import torch

from qclip._validate import Refusal

T = TypeVar("T")


class SharedContext:
    """A context that the first thread to enter opens and the last one to leave closes.

    With a context for each thread, one thread would restore what another had set.
    """

    def __init__(self, open_context: Callable[[], AbstractContextManager[object]]) -> None:
        self._open_context = open_context
        self._lock = threading.Lock()
        self._users = 0
        self._context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._context = self._open_context()
                self._context.__enter__()
            self._users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._context is not None:
                self._context.__exit__(None, None, None)
                self._context = None


# TF32: a GPU rounds the factors of float32 products to 10 bits; by default torch allows it for convolutions. These
# functions use torch's newer names (`fp32_precision`), which are right whichever names set it; the older names raise
# once both were used.

_chosen_tf32: tuple[str, ...] | None = None


def tf32_settings() -> tuple[str, ...]:
    """Return the user's settings for matrix products, convolutions and recurrent layers, also inside `without_tf32`."""
    chosen = _chosen_tf32  # read once: another thread may change it
    return _current_tf32() if chosen is None else chosen


def tf32_in_products() -> bool:
    """Return whether matrix products use TF32."""
    return tf32_settings()[0] == "tf32"


def tf32_anywhere(device: torch.device) -> bool:
    """Return whether any operation on the device uses TF32."""
    return device.type == "cuda" and "tf32" in tf32_settings()


def without_tf32() -> AbstractContextManager[None]:
    """Turn TF32 off: its rounding error, about 1e-3, hides the differences that proofs look for."""
    return _without_tf32


@contextmanager
def fp32_precision(setting: Literal["tf32", "ieee"]) -> Iterator[None]:
    """Set the precision of all float32 products, and restore the earlier settings on exit."""
    before, allowed = _current_tf32(), _allowed_by_the_older_name()
    try:
        _set_tf32((setting,) * len(before), None if allowed is None else setting == "tf32")
        yield
    finally:
        _set_tf32(before, allowed)


def _set_tf32(settings: Sequence[str], allowed: bool | None) -> None:
    """Set the precision of all float32 products, also by the older name where that can be read.

    ``torch.backends.cudnn.flags``, which a model may use in its forward pass, reads the older name.
    """
    if allowed is not None:
        torch._C._set_cudnn_allow_tf32(allowed)
    for switch, setting in zip(_tf32_switches(), settings, strict=True):
        switch.fp32_precision = setting


def _allowed_by_the_older_name() -> bool | None:
    try:
        return torch._C._get_cudnn_allow_tf32()
    except RuntimeError:  # it contradicts a newer one
        return None


@contextmanager
def _ieee_products() -> Iterator[None]:
    global _chosen_tf32  # noqa: PLW0603 - torch's setting is global
    _chosen_tf32 = _current_tf32()
    try:
        with fp32_precision("ieee"):
            yield
    finally:
        _chosen_tf32 = None


_without_tf32: Final = SharedContext(_ieee_products)


def _current_tf32() -> tuple[str, ...]:
    return tuple(switch.fp32_precision for switch in _tf32_switches())


def _tf32_switches() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


# Deterministic kernels: proofs compare one run with another. Other kernels on a GPU sum in no fixed order. In 16 bits
# that error grows from layer to layer, until examples seem to mix.

PREFER: Final = 1
"""Torch's level "warn": deterministic kernels, except for operations that have none, and except for attention."""
INSIST: Final = 2
"""Torch's level "error": attention too; an operation without a deterministic kernel fails, in whichever thread."""

_determinism_lock: Final = threading.RLock()
_chosen_determinism: int | None = None


def determinism_level() -> int:
    """Return torch's level of determinism as the user chose it, also inside `deterministically`."""
    level = _chosen_determinism  # read once: another thread may change it
    return torch.get_deterministic_debug_mode() if level is None else level


def deterministically(device: torch.device, compute: Callable[[], T]) -> T:
    """Return ``compute()`` without TF32 and, on a GPU, with deterministic kernels where there are any.

    If ``compute`` raises a `Refusal`, it runs again with level `INSIST`. That level is the exception because it is
    global, and another thread may need an operation that fails with it.

    Raises:
        Refusal: The first one, if the second run refuses too or needs an operation without a deterministic kernel.
    """
    with without_tf32():
        if device.type != "cuda":
            return compute()
        try:
            with _least_determinism(PREFER):
                return compute()
        except Refusal as refusal:
            if determinism_level() >= INSIST:
                raise
            try:
                with _least_determinism(INSIST):
                    return compute()
            except torch.OutOfMemoryError:
                raise
            except (Refusal, RuntimeError) as error:  # RuntimeError: an operation has no deterministic kernel
                raise refusal from error


@contextmanager
def _least_determinism(least: int) -> Iterator[None]:
    global _chosen_determinism  # noqa: PLW0603 - torch's setting is global
    memory: Any = torch.utils.deterministic
    with _determinism_lock:
        outer, level = _chosen_determinism, torch.get_deterministic_debug_mode()
        fills = memory.fill_uninitialized_memory
        if level >= least:
            yield
            return
        _chosen_determinism = determinism_level()
        try:
            memory.fill_uninitialized_memory = False
            torch.set_deterministic_debug_mode(least)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*deterministic")
                yield
        finally:
            torch.set_deterministic_debug_mode(level)
            memory.fill_uninitialized_memory = fills
            _chosen_determinism = outer


_uncompiled: Final = SharedContext(lambda: torch.compiler.set_stance("force_eager"))


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled parts of a model eagerly, so that their torch functions can be captured."""
    return _uncompiled if "torch._dynamo" in sys.modules else nullcontext()  # else nothing was compiled


OLDEST, NEWEST = (2, 11), (2, 15)
"""The range of tested minor releases; CONTRIBUTING.md has the table, pyproject.toml requires the oldest."""


@cache
def warn_if_untested(version: str) -> None:
    """Warn once about a torch outside the tested range; patch releases and builds count as their minor release."""
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else None
    if release is not None and OLDEST <= release <= NEWEST:
        return
    beyond = "not one of those" if release is None else "newer than any" if release > NEWEST else "older than any"
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    remedy = (
        "compare qclip.clipped_gradients with qclip.engine.oracle.clipped_gradients on your model, or run "
        "`make test-smoke` in the source tree with this torch, before you rely on it"
    )
    # Above: this function, Engine, and make_private or clipped_gradients.
    warnings.warn(f"torch {version} is {beyond} that qclip was tested with ({tested}); {remedy}", stacklevel=4)

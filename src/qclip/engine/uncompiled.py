"""Running compiled parts of a model uncompiled, so that their torch functions can be seen."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_users = 0
_stance: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Everything runs as written meanwhile; torch has one setting for all threads, so the last one out resets it."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    global _users, _stance  # noqa: PLW0603 - torch's setting is global
    with _lock:
        _users += 1
        if _users == 1:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _stance.__exit__(None, None, None)

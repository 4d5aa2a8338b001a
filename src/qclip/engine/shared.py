"""Settings that torch has one of for all threads."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType


class Shared:
    """A context that the first thread in opens and the last one out closes.

    If each opened one of its own, one of them would put back what another had set.
    """

    def __init__(self, open_one: Callable[[], AbstractContextManager[object]]) -> None:
        self._open_one = open_one
        self._lock = threading.Lock()
        self._users = 0
        self._context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._context = self._open_one()
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

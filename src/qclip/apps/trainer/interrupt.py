"""Handling of Ctrl-C: the first one waits for the end of the step, the second one does not."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """A context in which the first SIGINT sets ``asked`` and the second raises KeyboardInterrupt as usual.

    Signals reach the main thread only; in another thread the context does nothing.

    Args:
        quiet: Whether to say nothing, where another process of the run has the screen.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.asked = False
        """Whether to stop after the current step."""
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if not self._quiet:
            os.write(2, b"\nfinishing this step; Ctrl-C again stops at once\n")  # print is not safe here

"""Functions on several processes with a process group between them: `on_ranks`."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0) -> list[Any]:
    """Run ``function(rank, *args)`` on each rank; return what they return, or the exceptions that ended them.

    A process that dies returns None. One that still runs after the timeout is killed, and counts as hanging.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        started = [
            context.Process(target=_rank, args=(rank, size, Path(folder), queue, function, args), daemon=True)
            for rank in range(size)
        ]
        for process in started:
            process.start()
        outcomes: list[Any] = [None] * size
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in started) or not queue.empty():
            while not queue.empty():
                rank, outcome = queue.get()
                outcomes[rank] = outcome
            if time.monotonic() > deadline:
                for process in started:
                    process.kill()
                raise TimeoutError(f"ranks {[k for k, p in enumerate(started) if p.is_alive()]} hang; {outcomes}")
            time.sleep(0.02)
        return outcomes


def _rank(rank: int, size: int, folder: Path, queue: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        outcome = function(rank, *args)
    except BaseException as error:
        traceback.print_exc()
        outcome = Failed(type(error).__name__, str(error))
    queue.put((rank, outcome))


class Failed:
    """An exception on a rank, by the name of its class and its message."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}"

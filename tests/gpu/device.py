"""Where the tests of this folder run: on a GPU or, to rehearse them where there is none, on the CPU."""

import os
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch.utils import _pytree as pytree

from engine.cases import Problem

DEVICE: Final = torch.device(os.environ.get("QCLIP_TEST_DEVICE", "cuda"))
"""QCLIP_TEST_DEVICE=cpu rehearses every test that does not need the hardware."""
ON_GPU: Final = DEVICE.type == "cuda"


def missing() -> str | None:
    """Why nothing here can run."""
    if not ON_GPU or torch.cuda.is_available():
        return None
    return "torch finds no CUDA device; QCLIP_TEST_DEVICE=cpu rehearses these tests on the CPU"


def cuda_only(what: str) -> pytest.MarkDecorator:
    """For a test of what only a GPU has: left out of a rehearsal, by name."""
    return pytest.mark.skipif(not ON_GPU, reason=f"only on a GPU: {what}")


def require_memory(gib: float) -> None:
    """Skip where the GPU has less to give."""
    free, _ = torch.cuda.mem_get_info(DEVICE)
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free memory on the GPU, which has {free / 2**30:.0f}")


def moved(batch: Any) -> Any:
    """The same with its tensors on the device."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), batch)


def placed(problem: Problem) -> Problem:
    """The same with model and batch on the device."""
    return replace(
        problem, model=problem.model.to(DEVICE), inputs=moved(problem.inputs), targets=moved(problem.targets)
    )

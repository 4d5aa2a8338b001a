"""Running compiled parts of a model uncompiled, so that their torch functions can be seen."""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from qclip.engine.shared import Shared

_eager = Shared(lambda: torch.compiler.set_stance("force_eager"))


def uncompiled() -> AbstractContextManager[None]:
    """Everything runs as written meanwhile."""
    return _eager if "torch._dynamo" in sys.modules else nullcontext()  # else nothing was compiled

"""Checkpoints of sharded runs: a folder, to which each rank writes its part of every tensor.

    folder/current          the name of the latest checkpoint
    folder/NAME/training.pt what is not sharded, with the secrets of the run (`checkpoint.write`)
    folder/NAME/*           the parts, by torch.distributed.checkpoint

Guarantees:
    * The folder holds the old checkpoint or the new one, even after an interruption: ``current`` is replaced last.
    * Reading executes nothing. A file that has changed by a bit is refused.
    * Any number of ranks can read it, also a single process.
"""

import hashlib
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qclip import _validate as check
from qclip._files import replace_text
from qclip.training import checkpoint
from qclip.training.process_group import DTensor, dcp
from qclip.training.ranks import Ranks

_CURRENT: Final = "current"
_PLAIN: Final = "training.pt"


def write(folder: str | os.PathLike[str], content: dict[str, Any], ranks: Ranks) -> None:
    """Write a checkpoint; on all ranks.

    Args:
        folder: The folder, which is made if it does not exist.
        content: The sections of the checkpoint, by name. Sharded tensors are those that are DTensors.
        ranks: The processes that share the run.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise check.refuse("path", str(folder), "a folder with sharded=True", "pass another name, or remove the file")
    name = ranks.first(f"checkpoint-{secrets.token_hex(4)}")
    target = folder / name
    if ranks.rank == 0:
        target.mkdir(mode=0o700, parents=True)
    ranks.any(False)  # wait for the folder
    leaves, structure = pytree.tree_flatten_with_path(content)
    sharded = {pytree.keystr(path): x for path, x in leaves if isinstance(x, DTensor)}
    with _quietly():
        dcp.save(dict(sharded), checkpoint_id=target, no_dist=ranks.size == 1)
    digests = _digests(target, ranks)
    if ranks.rank == 0:
        plain = pytree.tree_unflatten([None if isinstance(x, DTensor) else x for _, x in leaves], structure)
        shapes = {key: (tuple(x.shape), x.dtype) for key, x in sharded.items()}
        checkpoint.write(target / _PLAIN, {"content": plain, "sharded": shapes, "digests": digests})
        replace_text(folder / _CURRENT, name)
        for earlier in folder.glob("checkpoint-*"):
            if earlier != target:
                shutil.rmtree(earlier)
    ranks.any(False)  # nobody goes on before the checkpoint is there


def read(
    folder: str | os.PathLike[str],
    device: torch.device,
    ranks: Ranks,
    empty: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor],
) -> dict[str, Any]:
    """Read a checkpoint; on all ranks.

    Args:
        folder: The folder.
        device: The device of the tensors.
        ranks: The processes that share the run.
        empty: Makes a tensor of a shape and a dtype on a device, whole or sharded, for a sharded one of the checkpoint.

    Returns:
        The sections of the checkpoint, by name.

    Raises:
        qclip.Refusal: If a file is missing, damaged, or newer than this version; on all ranks.
    """
    folder = Path(folder)
    if not (folder / _CURRENT).is_file():
        remedy = "check the name, or start a new run"
        raise check.refuse("path", str(folder), "a folder with a sharded checkpoint", remedy)
    target = folder / (folder / _CURRENT).read_text()
    content = checkpoint.read(target / _PLAIN, device)
    if _digests(target, ranks) != content["digests"]:
        remedy = "a file in it is missing, truncated or damaged; take an earlier copy"
        raise check.refuse("path", str(folder), "a whole sharded checkpoint", remedy)
    tensors: dict[str, Any] = {key: empty(shape, dtype, device) for key, (shape, dtype) in content["sharded"].items()}
    with _quietly():
        dcp.load(tensors, storage_reader=_SafeReader(target), no_dist=ranks.size == 1)
    leaves, structure = pytree.tree_flatten_with_path(content["content"])
    filled = [tensors.get(pytree.keystr(path), leaf) for path, leaf in leaves]
    return pytree.tree_unflatten(filled, structure)


def _digests(target: Path, ranks: Ranks) -> dict[str, str]:
    """Return a digest of each file of parts; each rank reads some of them."""
    files = sorted(path for path in target.iterdir() if path.name != _PLAIN)
    own = {}
    for path in files[ranks.rank :: ranks.size]:
        with path.open("rb") as file:
            own[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return dict(sorted(pair for digests in ranks.everyones(own) for pair in digests.items()))


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out torch's warning that there is one process only, which is said by ``no_dist`` already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


class _SafeReader(dcp.FileSystemReader):
    """A reader that does not execute what a file of metadata says."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _SafeUnpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _SafeUnpickler(pickle.Unpickler):
    """Makes descriptions of tensors and files, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" or (module, name) in _KNOWN:
            return super().find_class(module, name)
        remedy = "it was not written by torch.distributed.checkpoint alone; take a copy that you trust"
        raise check.refuse("sharded checkpoint", f"{module}.{name}", "a description of tensors and files", remedy)


_KNOWN: Final = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"), ("torch", "Size"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
    *(("torch", name) for name in ("float32", "float64", "bfloat16", "float16")),
}  # fmt: skip

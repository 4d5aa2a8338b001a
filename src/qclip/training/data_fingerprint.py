"""The fingerprint of a data set: does a resumed run have the data that it began with?"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from qclip._validate import Refusal
from qclip.engine.batch import to_device_async
from qclip.engine.randomness import RandomState, seed_all
from qclip.training.dataset import DatasetPart, dataset_parts

SAMPLE = 256
"""The number of items that are hashed as the data set returns them."""
_CHUNK = 2**24
"""Bytes that are hashed at a time: tensors on a GPU pass through the CPU in chunks."""


class DataFingerprint:
    """Digests of a data set under the secret key of a run, computed at the first use and cached.

    * "rows": every row in use of the tensors of each TensorDataset.
    * "items": `SAMPLE` items of any data set, at places that the key draws.

    The key follows from the secret seed. Without a key, whoever holds a digest could test a guess of the data.

    Args:
        dataset: The data set of the run.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._digests: dict[bytes, dict[str, str]] = {}

    def under(self, seed: np.random.SeedSequence) -> dict[str, str]:
        """Return the digests under a seed, by name, without those that the data set does not allow.

        The same data have the same digests, in any process and on any device.
        """
        key = _key(seed)
        if key not in self._digests:
            digests = {"rows": _rows_digest(self._dataset, key), "items": _items_digest(self._dataset, key)}
            self._digests[key] = {name: digest for name, digest in digests.items() if digest is not None}
        return self._digests[key]

    def require_same(self, seed: np.random.SeedSequence, saved: Mapping[str, str]) -> None:
        """Refuse the data set if its digests differ from those of a checkpoint."""
        digests = self.under(seed)
        if any(digests[name] != saved[name] for name in digests.keys() & saved.keys()):
            raise Refusal(
                "dataset has changed since the checkpoint was written: put back the data that the run began with, or "
                "start a new run; steps on other data with the noise and the samples of this run would reveal the "
                "difference"
            )


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def _key(seed: np.random.SeedSequence) -> bytes:
    # Longer than the spawn key of any step, so that the two never coincide.
    data_seed = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *b"data"))
    return data_seed.generate_state(8, np.uint64).tobytes()


def _rows_digest(dataset: Dataset[Any], key: bytes) -> str | None:
    """Return the digest of all rows that lie in tensors; None if there are none."""
    digest, any_rows = hashlib.blake2b(key=key), False
    for part in dataset_parts(dataset):
        if isinstance(part.base, TensorDataset) and all(map(_has_bytes, part.base.tensors)):
            any_rows = True
            _feed(digest, part.positions)
            for tensor in part.base.tensors:
                digest.update(f"{tensor.dtype} {tuple(tensor.shape[1:])};".encode())
                for rows in _chunks(tensor, part):
                    digest.update(_bytes(rows))
    return digest.hexdigest() if any_rows else None


def _chunks(tensor: Tensor, part: DatasetPart) -> Iterator[Tensor]:
    num_rows = max(1, _CHUNK // max(1, tensor[:1].numel() * tensor.element_size()))
    for start in range(0, len(tensor) if part.indices is None else len(part.indices), num_rows):
        if part.indices is None:
            yield tensor[start : start + num_rows]
        else:
            index = torch.from_numpy(part.indices[start : start + num_rows])
            yield tensor.index_select(0, to_device_async(index, tensor.device))


def _items_digest(dataset: Dataset[Any], key: bytes) -> str | None:
    """Return the digest of some items, as the data set returns them; None if they differ when read twice.

    The global generators are seeded for each item, so that random transforms repeat, and restored afterwards.
    """
    size = len(dataset)  # type: ignore[arg-type]
    rng = np.random.default_rng(list(key))
    indices = np.sort(rng.choice(size, min(size, SAMPLE), replace=False, shuffle=False)).tolist()
    digest, states = hashlib.blake2b(key=key), RandomState.now()
    _feed(digest, size)
    try:
        for index in indices:
            first, second = (_item_digest(_read_seeded(dataset, index), key) for _ in range(2))
            if first != second:
                return None
            digest.update(first)
    except Exception:  # a data set may be readable in its workers only; saving must not fail for that
        return None
    finally:
        states.restore()
    return digest.hexdigest()


def _read_seeded(dataset: Dataset[Any], index: int) -> Any:
    seed_all(index)
    return dataset[index]


def _item_digest(item: Any, key: bytes) -> bytes:
    digest = hashlib.blake2b(key=key)
    _feed(digest, item)
    return digest.digest()


def _feed(digest: _Hash, value: Any) -> None:
    """Hash a value as bytes that are the same in every process; for a type without such bytes, only its name."""
    match value:
        case Tensor() if _has_bytes(value):
            digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
            digest.update(_bytes(value))
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            digest.update(f"{value.dtype.str} {value.shape};".encode())
            digest.update(value.tobytes())
        case np.ndarray():
            _feed(digest, value.tolist())
        case str() | int() | float() | complex() | bytes() | None:
            text = repr(value).encode()
            digest.update(f"{len(text)};".encode() + text)
        case Mapping():
            _feed(digest, list(value.items()))
        case list() | tuple():
            digest.update(f"{len(value)} items;".encode())
            for item in value:
                _feed(digest, item)
        case _ if hasattr(value, "__array_interface__"):  # a PIL image
            _feed(digest, np.asarray(value))
        case _:
            digest.update(f"{type(value).__qualname__};".encode())


def _bytes(tensor: Tensor) -> Any:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy()


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested

"""The fingerprint of a data set: whether a run goes on with the data that it began with."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from qclip import _validate as check
from qclip.engine.batch import to_device_async
from qclip.engine.randomness import RandomState, seed_all
from qclip.training.dataset import Part, parts

SAMPLE = 256
"""How many items are looked at where a data set does not show all of its bytes."""
_CHUNK = 2**24
"""How many bytes are hashed at a time: a GPU's tensors pass through the CPU in pieces."""


class DataFingerprint:
    """Digests of a data set under the key of a run; computed when first asked for, and kept.

    Of the tensors of a TensorDataset every row that is used; of any data set `SAMPLE` items, at places that the key
    draws. The key follows from the secret seed: without one, whoever has a digest could test what the data are.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._known: dict[bytes, dict[str, str]] = {}

    def under(self, seed: np.random.SeedSequence) -> dict[str, str]:
        """The digests that can be had, by name; the same data have the same, in any process and on any device."""
        key = _key(seed)
        if key not in self._known:
            found = {"rows": _of_rows(self._dataset, key), "items": _of_items(self._dataset, key)}
            self._known[key] = {name: digest for name, digest in found.items() if digest is not None}
        return self._known[key]

    def require_same(self, seed: np.random.SeedSequence, known: Mapping[str, str]) -> None:
        """Refuse data that differ from those with these digests."""
        mine = self.under(seed)
        if any(mine[name] != known[name] for name in mine.keys() & known.keys()):
            remedy = (
                "put back the data that the run began with, or start a new run: steps on other data with the noise "
                "and the samples of this one would tell them apart"
            )
            raise check.refuse("dataset", "changed", "the one that the checkpoint was written with", remedy)


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def _key(seed: np.random.SeedSequence) -> bytes:
    own = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *b"data"))  # longer than any step's
    return own.generate_state(8, np.uint64).tobytes()


def _of_rows(dataset: Dataset[Any], key: bytes) -> str | None:
    """All that lies in tensors; None where nothing does."""
    found, any_rows = hashlib.blake2b(key=key), False
    for part in parts(dataset):
        if isinstance(part.base, TensorDataset) and all(map(_has_bytes, part.base.tensors)):
            any_rows = True
            _feed(found, part.positions)
            for tensor in part.base.tensors:
                found.update(f"{tensor.dtype} {tuple(tensor.shape[1:])};".encode())
                for rows in _chunks(tensor, part):
                    found.update(_bytes(rows))
    return found.hexdigest() if any_rows else None


def _chunks(tensor: Tensor, part: Part) -> Iterator[Tensor]:
    size = max(1, _CHUNK // max(1, tensor[:1].numel() * tensor.element_size()))
    for start in range(0, len(tensor) if part.indices is None else len(part.indices), size):
        if part.indices is None:
            yield tensor[start : start + size]
        else:
            chosen = torch.from_numpy(part.indices[start : start + size])
            yield tensor.index_select(0, to_device_async(chosen, tensor.device))


def _of_items(dataset: Dataset[Any], key: bytes) -> str | None:
    """Some items, as the data set gives them; None where they do not come again as they were.

    Random transforms that draw from the global generators find them seeded, and do: the generators are then put back.
    """
    size = len(dataset)  # type: ignore[arg-type]
    rng = np.random.default_rng(list(key))
    places = np.sort(rng.choice(size, min(size, SAMPLE), replace=False, shuffle=False)).tolist()
    found, before = hashlib.blake2b(key=key), RandomState.now()
    _feed(found, size)
    try:
        for place in places:
            item, again = (_digest(_fetch(dataset, place), key) for _ in range(2))
            if item != again:
                return None
            found.update(item)
    except Exception:  # a data set may be ready in its workers only; saving must not fail for that
        return None
    finally:
        before.restore()
    return found.hexdigest()


def _fetch(dataset: Dataset[Any], place: int) -> Any:
    seed_all(place)
    return dataset[place]


def _digest(item: Any, key: bytes) -> bytes:
    found = hashlib.blake2b(key=key)
    _feed(found, item)
    return found.digest()


def _feed(found: _Hash, value: Any) -> None:
    """Add a value in bytes that are the same in every process; of a kind without such bytes, its name alone."""
    match value:
        case Tensor() if _has_bytes(value):
            found.update(f"{value.dtype} {tuple(value.shape)};".encode())
            found.update(_bytes(value))
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            found.update(f"{value.dtype.str} {value.shape};".encode())
            found.update(value.tobytes())
        case np.ndarray():
            _feed(found, value.tolist())
        case str() | int() | float() | complex() | bytes() | None:
            text = repr(value).encode()
            found.update(f"{len(text)};".encode() + text)
        case Mapping():
            _feed(found, list(value.items()))
        case list() | tuple():
            found.update(f"{len(value)} items;".encode())
            for each in value:
                _feed(found, each)
        case _ if hasattr(value, "__array_interface__"):  # an image of PIL
            _feed(found, np.asarray(value))
        case _:
            found.update(f"{type(value).__qualname__};".encode())


def _bytes(tensor: Tensor) -> Any:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy()


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested

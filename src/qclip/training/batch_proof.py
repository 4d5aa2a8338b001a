"""Proofs of the way from the data set to the model: neither a collate function nor a loop may mix examples.

The engine proves what happens to a batch from the model onward. Before it, a collate function that pads to the longest
example, standardises by the batch or counts its tokens lets one example change what all the others contribute.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from qclip import _validate as check
from qclip.engine import Engine, Refusal
from qclip.engine.capture.constants import same
from qclip.engine.proof.perturbation import perturbed
from qclip.engine.proof.precision import in_digits_of
from qclip.engine.proof.proof import TOLERANCE
from qclip.engine.proof.prover import CALLS_FOR_REFUSAL, first_line, in_evaluation
from qclip.engine.randomness import RandomState
from qclip.engine.torch_settings import deterministically
from qclip.training.dataset import reads_lists

MOST: Final = 32
"""How many examples are collated again."""


@dataclass(frozen=True)
class Origin:
    """Where one leaf of what was used comes from: which leaf of the loader's batch, and how it was turned."""

    place: int
    like: Tensor | None
    """What it became; None where it is no tensor."""
    transposed: bool = False

    def taken(self, leaves: Sequence[Any]) -> Any:
        """The leaf of another batch, turned in the same way."""
        leaf = leaves[self.place]
        if self.like is None:
            return leaf
        leaf = in_digits_of(torch.float32, leaf.to(self.like.device, self.like.dtype))
        if self.transposed:
            return leaf.transpose(0, 1)
        if leaf.dim() == self.like.dim():
            return leaf
        return leaf.reshape(-1 if self.like.dim() == 1 else len(leaf), *self.like.shape[1:])


def origins(used: Any, given: Any) -> list[Origin | None]:
    """Where each leaf of the batch that is ``used`` comes from in the one that was ``given``, or a refusal.

    It may have been moved to another device, cast, reshaped, or turned to have its second dimension first. None for
    what is no data: flags, texts and None.
    """
    leaves = pytree.tree_leaves(given)
    found: list[Origin | None] = []
    for leaf in pytree.tree_leaves(used):
        if leaf is None or isinstance(leaf, bool | str | torch.dtype | torch.device):
            found.append(None)
            continue
        origin = next((o for k, each in enumerate(leaves) if (o := _origin(leaf, k, each)) is not None), None)
        if origin is None:
            what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
            remedy = (
                "put what is computed from a batch into the model, the loss or the data set, where it can be proven to "
                "treat every example by itself, and what does not come from the data into a buffer of the model"
            )
            raise check.refuse("batch", f"with {what} that is not in it", "what training.loader gave", remedy)
        found.append(origin)
    return found


def _origin(leaf: Any, place: int, given: Any) -> Origin | None:
    if not isinstance(leaf, Tensor):
        value = given.item() if isinstance(given, Tensor) and given.dim() == 0 else given
        return Origin(place, None) if type(value) is type(leaf) and value == leaf else None
    if leaf is given:
        return Origin(place, leaf)
    if not isinstance(given, Tensor) or given.numel() != leaf.numel():
        return None
    given = given.to(leaf.device, leaf.dtype)
    if same(given.reshape(leaf.shape), leaf):
        return Origin(place, leaf)
    turned = given.dim() > 1 and same(given.transpose(0, 1), leaf)
    return Origin(place, leaf, transposed=True) if turned else None


@dataclass(frozen=True)
class Fetch:
    """What a DataLoader does with a list of indices, in two steps that can be repeated."""

    dataset: Any
    collate: Any

    @staticmethod
    def of(source: Dataset[Any] | DataLoader[Any]) -> "Fetch":
        """As this data set, or this DataLoader, is read."""
        if isinstance(source, DataLoader):
            return Fetch(source.dataset, source.collate_fn)
        return Fetch(source, default_collate)

    @property
    def one_by_one(self) -> bool:
        """Whether it is known to treat each example by itself: torch's own way, which stacks them."""
        return self.collate is default_collate and not reads_lists(self.dataset)

    @property
    def name(self) -> str:
        """For messages."""
        if self.collate is default_collate:
            return f"{type(self.dataset).__name__}.__getitems__"
        return getattr(self.collate, "__qualname__", type(self.collate).__name__)

    def items(self, indices: Sequence[int]) -> list[Any]:
        """What the collate function is given for each of them; of a data set that reads lists, the index."""
        return list(indices) if reads_lists(self.dataset) else [self.dataset[index] for index in indices]

    def batch(self, items: Sequence[Any]) -> Any:
        """The items collated; a collate function may write into copies of them."""
        if reads_lists(self.dataset):
            return self.collate(self.dataset.__getitems__(list(items)))
        return self.collate(copy.deepcopy(list(items)))


class FetchProof:
    """Proves that an example's loss and gradient do not depend on which others were fetched with it."""

    def __init__(self, fetch: Fetch, engine: Engine, dataset_size: int) -> None:
        self._fetch, self._engine, self._dataset_size = fetch, engine, dataset_size

    def require_independent(
        self, indices: Sequence[int], losses: Callable[[Any, int], Tensor], used: Any, given: Any
    ) -> None:
        """Refuse a collate function, or a loop, that mixes these examples.

        ``losses(used, count)`` are those of what was ``used``, which must be what the loader had ``given``.
        """
        sources = origins(used, given)
        if self._fetch.one_by_one:
            return
        leaves, structure = pytree.tree_flatten(used)

        def evaluate(batch: Any, count: int) -> Tensor:
            others = pytree.tree_leaves(batch)
            taken = [x if origin is None else origin.taken(others) for x, origin in zip(leaves, sources, strict=True)]
            return losses(pytree.tree_unflatten(taken, structure), count)

        engine = self._engine
        with (
            RandomState.now(engine.device).replayed(),
            engine.in_precision(torch.float32),
            perturbed(engine.parameters.values()),
        ):
            deterministically(engine.device, lambda: self._require_independent(list(indices)[:MOST], evaluate))

    def _require_independent(self, indices: list[int], evaluate: "Evaluate") -> None:
        chosen = np.random.default_rng(len(indices)).integers(self._dataset_size, size=len(indices))
        items, others = (self._called(self._fetch.items, each) for each in (indices, chosen.tolist()))
        batch, draws = self._collated(items)
        for stay, changed in _rounds(items, others):
            other, _ = self._collated(changed)
            if draws and (len(changed) != len(items) or _shapes(other) != _shapes(batch)):
                continue  # an honest collate function, too, has drawn other numbers then
            pair = (batch, len(items)), (other, len(changed))
            if self._agree(*pair, stay, evaluate):
                continue
            if self._engine.draws:  # for other shapes a model draws other numbers
                with in_evaluation(self._engine.model):
                    if self._agree(*pair, stay, evaluate):
                        continue
            raise self._refusal(reshaped=_shapes(other) != _shapes(batch))

    def _agree(self, one: "Sized", other: "Sized", stay: list[int], evaluate: "Evaluate") -> bool:
        """Whether the examples that stay have the same losses and the same gradient in both batches."""
        parameters = list(self._engine.parameters.values())
        start = RandomState.now(self._engine.device)
        found = []
        for batch, count in (one, other):
            with start.replayed(), torch.enable_grad():
                losses = self._called(evaluate, batch, count)[stay]
                finite = losses.isfinite()
                total = torch.where(finite, losses, 0).sum()
                grads = torch.autograd.grad(total, parameters, allow_unused=True)
                found.append((losses.detach(), finite, [x for x in grads if x is not None]))
        (a, a_finite, a_grads), (b, b_finite, b_grads) = found
        if not torch.equal(a_finite, b_finite) or len(a_grads) != len(b_grads):
            return False
        apart = torch.where(a_finite, a - b, 0).abs() > TOLERANCE * (a.abs() + b.abs()) + 1e-12
        if bool((apart & a_finite).any()):
            return False
        lengths = [_length(grads) for grads in (a_grads, b_grads)]
        difference = _length([x - y for x, y in zip(a_grads, b_grads, strict=True)])
        return bool(difference <= 10 * TOLERANCE * sum(lengths) + 1e-12)

    def _collated(self, items: Sequence[Any]) -> tuple[Any, bool]:
        """The batch, and whether random numbers were drawn for it: the same ones every time."""
        start = RandomState.now(self._engine.device)
        with start.replayed():
            batch = self._called(self._fetch.batch, items)
            draws = not (start.unmoved() and start.python_unmoved())
            self._engine.draws |= draws  # a batch of another size gives examples other numbers, as in a model
            return batch, draws

    def _called(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Refusal:
            raise
        except CALLS_FOR_REFUSAL as error:
            raise Refusal(
                f"{self._fetch.name} could not be called again, in this process and with some examples replaced or "
                f"left out: {first_line(error)}. That is how it is proven to treat every example by itself"
            ) from error

    def _refusal(self, *, reshaped: bool) -> Refusal:
        remedy = (
            "pad to a fixed length, as qclip.integrations.transformers.fixed_length does, or to one of a public list "
            "of lengths with a mask that the model obeys: the longest of a batch decides about the others, and the "
            "model does not mask that out"
            if reshaped
            else "let it treat every example by itself: statistics of the whole data set must be known beforehand, "
            "counts of tokens belong to each example, and examples must not be blended"
        )
        return Refusal(
            f"{self._fetch.name} mixes examples: with others beside it in the batch, an example has another loss or "
            f"gradient; {remedy}"
        )


Evaluate = Callable[[Any, int], Tensor]
Sized = tuple[Any, int]
"""A batch, and of how many examples."""


def _rounds(items: list[Any], others: list[Any]) -> Iterator[tuple[list[int], list[Any]]]:
    """Which examples stay, and what to collate: with others replaced, by other items or by copies, added or left out.

    The places of those that stay are the same.
    """
    count = len(items)
    for first in (0, 1) if count > 1 else ():
        stay = list(range(first, count, 2))
        yield stay, [items[k] if k % 2 == first else others[k] for k in range(count)]
        yield stay, [items[k] if k % 2 == first else items[stay[k % len(stay)]] for k in range(count)]
    for some in sorted({1, 2, count // 2} & set(range(1, count))):  # the fewer, the more a longest one tells
        yield list(range(some)), items[:some]
    yield list(range(count)), [*items, others[0]]


def _shapes(batch: Any) -> list[Any]:
    """Of what one example has."""
    return [tuple(x.shape[1:]) if isinstance(x, Tensor) else type(x) for x in pytree.tree_leaves(batch)]


def _length(tensors: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.double()) for x in tensors]))

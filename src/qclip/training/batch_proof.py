"""Proof that neither the collate function nor the training loop mixes examples before they reach the model.

The engine's proofs begin at the model. Before it, a collate function that pads to the longest example, standardizes
over the batch or counts the tokens of the batch lets one example change the contributions of all others.
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

from qclip.engine import Engine, Refusal
from qclip.engine.capture.constants import same
from qclip.engine.proof.perturbation import perturbed
from qclip.engine.proof.precision import at_least
from qclip.engine.proof.proof import TOLERANCE
from qclip.engine.proof.prover import CALLS_FOR_REFUSAL, first_line, in_evaluation
from qclip.engine.randomness import RandomState
from qclip.engine.torch_settings import deterministically
from qclip.training.dataset import reads_lists

MOST_EXAMPLES: Final = 32
"""The most examples of a batch that are collated again."""
LATER_EXAMPLES: Final = 4
"""The most examples in the third and later proofs, which are about other sizes or later batches."""
Evaluate = Callable[[Any, int], Tensor]
"""Returns the losses of a batch, [B], given the batch and its number of examples."""
SizedBatch = tuple[Any, int]
"""A batch, and its number of examples."""


@dataclass(frozen=True)
class Origin:
    """The origin of a leaf of the used batch: a leaf of the loader's batch, and the conversion between them."""

    leaf_index: int
    template: Tensor | None
    """The leaf as it was used; None if it is not a tensor."""
    transposed: bool = False

    def convert(self, leaves: Sequence[Any]) -> Any:
        """Return the leaf of another batch, given that batch's leaves, after the same conversion."""
        leaf = leaves[self.leaf_index]
        if self.template is None:
            return leaf
        leaf = at_least(torch.float32, leaf.to(self.template.device, self.template.dtype))
        if self.transposed:
            return leaf.transpose(0, 1)
        if leaf.dim() == self.template.dim():
            return leaf
        return leaf.reshape(-1 if self.template.dim() == 1 else len(leaf), *self.template.shape[1:])


def origins(used: Any, loaded: Any) -> list[Origin | None]:
    """Return the origin of each leaf of the used batch in the batch that the loader yielded.

    Args:
        used: The batch that went through the model. A leaf may have been moved to another device, cast, reshaped, or
            transposed in its first two dimensions.
        loaded: The batch that the loader yielded.

    Returns:
        An origin for each leaf of ``used``; None for leaves that hold no data: None, flags, strings, dtypes, devices.

    Raises:
        qclip.Refusal: If a leaf has no origin.
    """
    loaded_leaves = pytree.tree_leaves(loaded)
    leaf_origins: list[Origin | None] = []
    for leaf in pytree.tree_leaves(used):
        if leaf is None or isinstance(leaf, bool | str | torch.dtype | torch.device):
            leaf_origins.append(None)
            continue
        candidates = (_origin(leaf, k, loaded_leaf) for k, loaded_leaf in enumerate(loaded_leaves))
        origin = next((candidate for candidate in candidates if candidate is not None), None)
        if origin is None:
            value = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
            raise Refusal(
                f"batch has {value} that training.loader did not yield: compute it in the model, the loss or the data "
                "set, where it can be proven to treat every example by itself; a value that does not come from the "
                "data belongs in a buffer of the model"
            )
        leaf_origins.append(origin)
    return leaf_origins


def _origin(leaf: Any, leaf_index: int, loaded: Any) -> Origin | None:
    if not isinstance(leaf, Tensor):
        value = loaded.item() if isinstance(loaded, Tensor) and loaded.dim() == 0 else loaded
        return Origin(leaf_index, None) if type(value) is type(leaf) and value == leaf else None
    if leaf is loaded:
        return Origin(leaf_index, leaf)
    if not isinstance(loaded, Tensor) or loaded.numel() != leaf.numel():
        return None
    loaded = loaded.to(leaf.device, leaf.dtype)
    if same(loaded.reshape(leaf.shape), leaf):
        return Origin(leaf_index, leaf)
    is_transposed = loaded.dim() > 1 and same(loaded.transpose(0, 1), leaf)
    return Origin(leaf_index, leaf, transposed=True) if is_transposed else None


@dataclass(frozen=True)
class Fetch:
    """The work of a DataLoader on a list of indices, in two stages that can be repeated: read, then collate."""

    dataset: Any
    collate: Any

    @staticmethod
    def of(source: Dataset[Any] | DataLoader[Any]) -> "Fetch":
        """Return the fetch of a DataLoader, or of a data set with torch's default collate function."""
        if isinstance(source, DataLoader):
            return Fetch(source.dataset, source.collate_fn)
        return Fetch(source, default_collate)

    @property
    def one_by_one(self) -> bool:
        """Whether it is known to treat each example by itself: torch's default, which stacks items."""
        return self.collate is default_collate and not reads_lists(self.dataset)

    @property
    def name(self) -> str:
        """The name of the function that may mix examples, for messages."""
        if self.collate is default_collate:
            return f"{type(self.dataset).__name__}.__getitems__"
        return getattr(self.collate, "__qualname__", type(self.collate).__name__)

    def items(self, indices: Sequence[int]) -> list[Any]:
        """Return the inputs of `batch` for these examples: the items, or the indices if the data set reads lists."""
        return list(indices) if reads_lists(self.dataset) else [self.dataset[index] for index in indices]

    def batch(self, items: Sequence[Any]) -> Any:
        """Return the items collated. The collate function gets copies, which it may write to."""
        if reads_lists(self.dataset):
            return self.collate(self.dataset.__getitems__(list(items)))
        return self.collate(copy.deepcopy(list(items)))


class FetchProof:
    """Proves that an example's loss and gradient do not depend on the other examples of its batch.

    It collates examples of the batch again, with other examples replaced, duplicated, added or left out, and compares
    losses and gradients of the examples that stay.

    Guarantees:
        * A difference beyond rounding is refused. The message names the collate function and the remedy.
        * Every tensor and number that was used must be in the loader's batch: moved, cast, reshaped or transposed, but
          not computed from it.
        * The proof leaves no trace: parameters, random numbers, items and training flags are as before.

    Edge cases:
        * torch's default collate function on a data set that reads single items needs no proof.
        * Random numbers: every evaluation replays the same ones. A collate function or a model that draws may draw
          other numbers for other shapes; a collate function is then not compared, a model is compared in evaluation
          mode.
        * At most `MOST_EXAMPLES` examples are collated again, and `LATER_EXAMPLES` in the third and later proofs.
        * A collate function that fails when it is called again is refused.

    Args:
        fetch: The data set and its collate function.
        engine: The engine of the model.
        dataset_size: The number of examples that replacements are drawn from.
    """

    def __init__(self, fetch: Fetch, engine: Engine, dataset_size: int) -> None:
        self._fetch, self._engine, self._dataset_size = fetch, engine, dataset_size
        self._num_proofs = 0

    @property
    def runs_the_model(self) -> bool:
        """Whether the proof has to run the model: not for torch's default collate function."""
        return not self._fetch.one_by_one

    def require_independent(self, indices: Sequence[int], losses: Evaluate, used: Any, loaded: Any) -> None:
        """Refuse a collate function, or a training loop, that mixes the examples of a batch.

        Args:
            indices: The examples of the batch.
            losses: Returns the losses of a batch, [B], given the batch as it was used and its number of examples.
            used: The batch that went through the model.
            loaded: The batch that the loader yielded.
        """
        leaf_origins = origins(used, loaded)
        if not self.runs_the_model:
            return
        used_leaves, structure = pytree.tree_flatten(used)

        def evaluate(batch: Any, num_examples: int) -> Tensor:
            leaves = pytree.tree_leaves(batch)
            converted = [
                leaf if origin is None else origin.convert(leaves)
                for leaf, origin in zip(used_leaves, leaf_origins, strict=True)
            ]
            return losses(pytree.tree_unflatten(converted, structure), num_examples)

        engine = self._engine
        some = list(indices)[: MOST_EXAMPLES if self._num_proofs < 2 else LATER_EXAMPLES]
        with (
            RandomState.now(engine.device).replayed(),
            engine.in_precision(torch.float32),
            perturbed(engine.parameters.values()),
        ):
            deterministically(engine.device, lambda: self._compare(some, evaluate))
        self._num_proofs += len(some) > 1

    def _compare(self, indices: list[int], evaluate: Evaluate) -> None:
        other_indices = np.random.default_rng(len(indices)).integers(self._dataset_size, size=len(indices)).tolist()
        items, other_items = (self._call(self._fetch.items, examples) for examples in (indices, other_indices))
        batch, draws = self._collate(items)
        for kept, changed_items in _changed_batches(items, other_items):
            changed, _ = self._collate(changed_items)
            is_reshaped = _shapes(changed) != _shapes(batch)
            if draws and (len(changed_items) != len(items) or is_reshaped):
                continue  # an independent collate function draws other numbers for another shape, too
            pair = (batch, len(items)), (changed, len(changed_items))
            if self._agree(*pair, kept, evaluate):
                continue
            if self._engine.draws:  # for another shape a model draws other numbers
                with in_evaluation(self._engine.model):
                    if self._agree(*pair, kept, evaluate):
                        continue
            raise self._refusal(is_reshaped=is_reshaped)

    def _agree(self, one: SizedBatch, other: SizedBatch, kept: list[int], evaluate: Evaluate) -> bool:
        """Return whether the kept examples have the same losses and the same gradient in both batches."""
        parameters = list(self._engine.parameters.values())
        start = RandomState.now(self._engine.device)
        results = []
        for batch, num_examples in (one, other):
            with start.replayed(), torch.enable_grad():
                losses = self._call(evaluate, batch, num_examples)[kept]
                is_finite = losses.isfinite()
                total = torch.where(is_finite, losses, 0).sum()
                grads = torch.autograd.grad(total, parameters, allow_unused=True)
                results.append((losses.detach(), is_finite, [grad for grad in grads if grad is not None]))
        (a, a_is_finite, a_grads), (b, b_is_finite, b_grads) = results
        if not torch.equal(a_is_finite, b_is_finite) or len(a_grads) != len(b_grads):
            return False
        differs = torch.where(a_is_finite, a - b, 0).abs() > TOLERANCE * (a.abs() + b.abs()) + 1e-12
        if bool((differs & a_is_finite).any()):
            return False
        norms = [_norm(grads) for grads in (a_grads, b_grads)]
        difference = _norm([x - y for x, y in zip(a_grads, b_grads, strict=True)])
        return bool(difference <= 10 * TOLERANCE * sum(norms) + 1e-12)

    def _collate(self, items: Sequence[Any]) -> tuple[Any, bool]:
        """Return the batch, and whether random numbers were drawn for it; every call replays the same ones."""
        start = RandomState.now(self._engine.device)
        with start.replayed():
            batch = self._call(self._fetch.batch, items)
            draws = not (start.unmoved() and start.python_unmoved())
            self._engine.draws |= draws  # as in a model, examples of a batch of another size get other numbers
            return batch, draws

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Refusal:
            raise
        except CALLS_FOR_REFUSAL as error:
            raise Refusal(
                f"{self._fetch.name} could not be called again, in this process and with some examples replaced or "
                f"left out, which is how it is proven to treat every example by itself: {first_line(error)}"
            ) from error

    def _refusal(self, *, is_reshaped: bool) -> Refusal:
        remedy = (
            "pad to a fixed length, as qclip.integrations.transformers.fixed_length does, or give the model a mask "
            "that it obeys, as bucketed_lengths there does: the longest example of a batch sets the length of the "
            "others, and the model does not mask the padding"
            if is_reshaped
            else "let it treat every example by itself: compute statistics of the whole data set beforehand, count "
            "tokens for each example, and do not blend examples"
        )
        return Refusal(
            f"{self._fetch.name} mixes examples: the loss or the gradient of an example depends on the others in its "
            f"batch; {remedy}"
        )


def _changed_batches(items: list[Any], others: list[Any]) -> Iterator[tuple[list[int], list[Any]]]:
    """Yield batches with other examples replaced, replaced by copies, left out or added, as (kept, items).

    ``kept`` are the places of the examples that both batches share; they are the same in both.
    """
    num_items = len(items)
    for first in (0, 1) if num_items > 1 else ():
        kept = list(range(first, num_items, 2))
        yield kept, [items[k] if k % 2 == first else others[k] for k in range(num_items)]
        yield kept, [items[k] if k % 2 == first else items[kept[k % len(kept)]] for k in range(num_items)]
    for num_kept in sorted({1, 2, num_items // 2} & set(range(1, num_items))):  # few: most likely without the longest
        yield list(range(num_kept)), items[:num_kept]
    yield list(range(num_items)), [*items, others[0]]


def _shapes(batch: Any) -> list[Any]:
    """Return the shape of one example in each leaf."""
    return [tuple(leaf.shape[1:]) if isinstance(leaf, Tensor) else type(leaf) for leaf in pytree.tree_leaves(batch)]


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.double()) for x in tensors]))

"""The clipper: from a batch of the loader to its clipped gradients, with a proof of every stage between."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qclip._validate import Refusal
from qclip.engine import ClippedGradients, Engine
from qclip.engine.batch import to_device_async
from qclip.engine.compiled.driver import Compiled
from qclip.training import rows
from qclip.training.batch_proof import Evaluate, FetchProof
from qclip.training.loader import Ticket, TicketLoader
from qclip.training.losses import PerExample
from qclip.training.sums import ClipNorms


@dataclass(frozen=True)
class Evaluation:
    """The computation of one loss per example: from a batch through the model, or from outputs with a criterion."""

    losses: Callable[[Any], Tensor]
    """Returns the losses of a whole batch, [B]."""
    criterion: PerExample | None
    """None if the losses can only be computed from a whole batch."""
    rows_per_example: int = 1


class Clipper:
    """Clips the per-example gradients of physical batches, compiled or eager.

    Whenever the engine proves the model on a batch, `FetchProof` proves how that batch was fetched.

    Args:
        engine: The engine of the model.
        compiled: The compiled driver of the engine; None to run eager.
        evaluation: The computation of the losses.
        fetch_proof: The proof of the data set and its collate function.
    """

    def __init__(
        self, engine: Engine, compiled: Compiled | None, evaluation: Evaluation, fetch_proof: FetchProof
    ) -> None:
        self._engine, self._compiled, self._evaluation, self._fetch_proof = engine, compiled, evaluation, fetch_proof

    def require_criterion(self) -> PerExample:
        """Return the criterion; refuse if losses can only be computed from a whole batch."""
        if self._evaluation.criterion is None:
            raise Refusal(
                "training.loss(outputs, targets) needs loss= and one row per example: with per_example_loss= or "
                "rows_per_example > 1, qclip runs the model itself; pass the batch, training.loss(batch)"
            )
        return self._evaluation.criterion

    def clip_batch(self, batch: Any, ticket: Ticket, clip_norms: ClipNorms) -> ClippedGradients:
        """Run the model on a batch and clip the per-example gradients.

        Args:
            batch: The batch of the loader, on any device.
            ticket: Its ticket.
            clip_norms: The clip norm of each group, or a function that chooses them.

        Returns:
            The clipped gradients of the examples that count.
        """
        is_counted = ticket.is_counted(self._engine.device)
        gradients = self._clipped(self._placed(batch, ticket.num_slots), clip_norms, is_counted)

        def losses(other: Any, num_examples: int) -> Tensor:
            return self._evaluation.losses(self._placed(other, num_examples))

        self._prove_fetch(ticket, lambda _: (losses, batch))
        return gradients

    def clip_outputs(self, outputs: Any, targets: Any, ticket: Ticket, clip_norms: ClipNorms) -> ClippedGradients:
        """Clip the per-example gradients of a forward pass that the user has run.

        Args:
            outputs: The outputs of the model.
            targets: The targets of the same batch.
            ticket: The ticket of that batch.
            clip_norms: The clip norm of each group, or a function that chooses them.

        Returns:
            The clipped gradients of the examples that count.
        """
        criterion = self.require_criterion()
        if self._compiled is not None:
            self._compiled.say(
                "the model was called outside qclip: training.step(batch) and training.loss(batch) are compiled"
            )
        self._engine.proven = None  # a proof that `dataset_norms` left is not one of this batch
        is_counted = ticket.is_counted(self._engine.device)
        gradients = self._engine.finish(outputs, targets, criterion, clip_norms, mask=is_counted)

        def of_the_user(proven: Any) -> tuple[Evaluate, Any]:
            evaluate, used = proven
            return lambda other, _: evaluate(other), used

        self._prove_fetch(ticket, of_the_user)
        return gradients

    def _prove_fetch(self, ticket: Ticket, evaluation: Callable[[Any], tuple[Evaluate, Any]]) -> None:
        """Prove how a batch was fetched, if the engine has just proven the model on it.

        Args:
            ticket: The ticket of the batch.
            evaluation: Returns the losses of a batch, as a function, and the batch that was used, given the proof.
        """
        proven, self._engine.proven = self._engine.proven, None
        proof, sharding = self._fetch_proof, self._engine.sharding
        # Whether a fetch needs values of parameters is the same on all ranks; whether it is proven now may not be.
        needed = sharding.whole(self._engine.model, lambda: proven is not None)
        with needed if proof.runs_the_model else nullcontext():
            if proven is not None:
                losses, used = evaluation(proven)
                proof.require_independent(ticket.indices, losses, used, ticket.batch)
            sharding.require_all_well()

    def dataset_norms(self, loader: TicketLoader, chunk: int) -> np.ndarray:
        """Return the raw gradient norms of the whole data set at the current parameters, [num_examples, K]."""
        norms = []
        for start, batch in zip(range(0, loader.num_examples, chunk), loader.everything(chunk), strict=True):
            batch_size = min(chunk, loader.num_examples - start)
            is_counted = torch.ones(batch_size, dtype=torch.bool, device=self._engine.device)
            clipped = self._clipped(self._placed(batch, batch_size), (1.0,) * len(self._engine.groups), is_counted)
            norms.append(clipped.group_norms.cpu().numpy())
        return np.concatenate(norms)

    def _clipped(self, batch: Any, clip_norms: ClipNorms, is_counted: Tensor) -> ClippedGradients:
        if self._compiled is None:
            return self._engine.clipped(self._evaluation.losses, batch, clip_norms, mask=is_counted)
        return self._compiled.clipped(self._evaluation.losses, batch, clip_norms, mask=is_counted, wait=False)

    def _placed(self, batch: Any, num_examples: int) -> Any:
        """Return the batch on the model's device, as [num_examples, rows, ...] if an example has several rows."""
        batch = pytree.tree_map_only(Tensor, lambda tensor: to_device_async(tensor, self._engine.device), batch)
        k = self._evaluation.rows_per_example
        return batch if k == 1 else rows.split(batch, num_examples, k)

"""The clipper: from a batch of the loader to its clipped gradients, with everything on the way proven."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qclip import _validate as check
from qclip.engine import ClippedGradients, Engine
from qclip.engine.batch import to_device_async
from qclip.engine.compiled.driver import Compiled
from qclip.training import rows
from qclip.training.batch_proof import FetchProof
from qclip.training.loader import Ticket, TicketLoader
from qclip.training.losses import PerExample
from qclip.training.sums import ClipNorms


@dataclass(frozen=True)
class Evaluation:
    """How a batch becomes one loss per example: through the model, or from its outputs with a criterion."""

    losses: Callable[[Any], Tensor]
    """Returns the losses of a whole batch, [B]."""
    criterion: PerExample | None
    """None where only a whole batch will do."""
    rows_per_example: int = 1


class Clipper:
    """Clips the per-example gradients of physical batches, compiled or eager.

    Whenever the engine has proven the model on a batch, the way of that batch from the data set to the model is
    proven, too (`FetchProof`).
    """

    def __init__(
        self, engine: Engine, compiled: Compiled | None, evaluation: Evaluation, fetch_proof: FetchProof
    ) -> None:
        self._engine, self._compiled, self._evaluation, self._fetch_proof = engine, compiled, evaluation, fetch_proof

    def require_criterion(self) -> PerExample:
        """Return what turns outputs and targets into losses; refused where only a whole batch will do."""
        if self._evaluation.criterion is None:
            remedy = "pass the batch, training.loss(batch)"
            bound = (
                "left out: with per_example_loss, or several rows per example, the batch goes through the model here"
            )
            raise check.refuse("outputs, targets", "given", bound, remedy)
        return self._evaluation.criterion

    def clip_batch(self, batch: Any, ticket: Ticket, clip_norms: ClipNorms) -> ClippedGradients:
        """Clip a batch that goes through the model here."""
        is_counted = ticket.is_counted(self._engine.device)
        gradients = self._clipped(self._placed(batch, ticket.num_slots), clip_norms, is_counted)
        if self._newly_proven() is not None:

            def losses(used: Any, num_examples: int) -> Tensor:
                return self._evaluation.losses(self._placed(used, num_examples))

            self._fetch_proof.require_independent(ticket.indices, losses, batch, ticket.batch)
        return gradients

    def clip_outputs(self, outputs: Any, targets: Any, ticket: Ticket, clip_norms: ClipNorms) -> ClippedGradients:
        """Clip a batch that the user has sent through the model."""
        criterion = self.require_criterion()
        if self._compiled is not None:
            self._compiled.say(
                "the model was called outside: training.step(batch) and training.loss(batch) are compiled"
            )
        self._engine.proven = None  # of raw norms, which some thresholds look at first
        is_counted = ticket.is_counted(self._engine.device)
        gradients = self._engine.finish(outputs, targets, criterion, clip_norms, mask=is_counted)
        if (proven := self._newly_proven()) is not None:
            evaluate, used = proven
            self._fetch_proof.require_independent(ticket.indices, lambda used, _: evaluate(used), used, ticket.batch)
        return gradients

    def dataset_norms(self, loader: TicketLoader, chunk: int) -> np.ndarray:
        """Return the raw norms of the whole data set at the current parameters, [examples, K]."""
        norms = []
        for start, batch in zip(range(0, loader.num_examples, chunk), loader.everything(chunk), strict=True):
            size = min(chunk, loader.num_examples - start)
            is_counted = torch.ones(size, dtype=torch.bool, device=self._engine.device)
            clipped = self._clipped(self._placed(batch, size), (1.0,) * len(self._engine.groups), is_counted)
            norms.append(clipped.group_norms.cpu().numpy())
        return np.concatenate(norms)

    def _clipped(self, batch: Any, clip_norms: ClipNorms, is_counted: Tensor) -> ClippedGradients:
        if self._compiled is None:
            return self._engine.clipped(self._evaluation.losses, batch, clip_norms, mask=is_counted)
        return self._compiled.clipped(self._evaluation.losses, batch, clip_norms, mask=is_counted, wait=False)

    def _placed(self, batch: Any, num_examples: int) -> Any:
        """Move the batch to the model's device, as [examples, rows, ...] where an example has several rows."""
        batch = pytree.tree_map_only(Tensor, lambda tensor: to_device_async(tensor, self._engine.device), batch)
        k = self._evaluation.rows_per_example
        return batch if k == 1 else rows.split(batch, num_examples, k)

    def _newly_proven(self) -> Any:
        """Return what the engine has proven since the last call."""
        proven, self._engine.proven = self._engine.proven, None
        return proven

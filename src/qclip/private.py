"""Private training of a PyTorch model: `make_private` and what it returns."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from qclip import _validate as check
from qclip import accounting, mechanism
from qclip.engine import ClippedGradients, Engine
from qclip.engine.engine import call
from qclip.engine.groups import GroupSpec
from qclip.guard import Guard
from qclip.losses import PerExample, per_example
from qclip.sampling import PoissonLoader, PoissonSampler, Ticket, dataset_size
from qclip.thresholds import Count, PrivateQuantile, Threshold
from qclip.training_plan import TrainingPlan, plan_training


@dataclass(frozen=True)
class StepRecord:
    """A logical step, in public and released values only."""

    step: int
    tau: tuple[float, ...]
    """The threshold of each group."""
    noisy_unclipped: tuple[float, ...]
    """The noisy fraction of examples left unclipped in each group; empty where the threshold does not ask for it."""
    step_size: float
    """The learning rate of the (first) optimizer's first group."""


class LogicalBatch:
    """The raw sums over the physical batches so far of one logical batch, all clipped at the same thresholds."""

    def __init__(self, clip_norms: tuple[float, ...], count: Count | None) -> None:
        self.clip_norms = clip_norms
        self.count = count
        self.parts = 0
        self.sums: dict[str, Tensor] = {}
        self._centred: Tensor | None = None

    def add(self, gradients: ClippedGradients, ticket: Ticket) -> None:
        """Take in one physical batch."""
        assert math.isclose(gradients.l2_bound, math.hypot(*self.clip_norms)), "the engine clipped at other norms"
        for name, value in gradients.sums.items():
            self.sums[name] = self.sums[name].add_(value) if name in self.sums else value
        if self.count is not None:
            centred = gradients.count_under(self.count.radii).float() - self.count.centre * ticket.size
            self._centred = centred if self._centred is None else self._centred + centred
        self.parts += 1

    def counts(self) -> mechanism.BoundedSum | None:
        """What the threshold asked for."""
        if self.count is None or self._centred is None:
            return None
        return mechanism.BoundedSum({"counts": self._centred}, {"counts": 0}, (self.count.l2_bound,))


class PrivateLoss:
    """The loss of a physical batch: `backward` hands its clipped gradients over, instead of writing raw ones."""

    def __init__(self, raw_loss: Tensor, hand_over: Callable[[], None]) -> None:
        self._raw_loss = raw_loss
        self._hand_over: Callable[[], None] | None = hand_over

    def backward(self) -> None:
        """Add the batch to its logical batch; at the last one, write the noisy gradient to ``.grad``."""
        hand_over, self._hand_over = self._hand_over, None  # the raw gradients go with it
        if hand_over is None:
            raise _stale_loss()
        hand_over()

    def item(self) -> float:
        """The mean loss of the batch: raw, for the screen only."""
        return self._raw_loss.item()

    def __iter__(self) -> Iterator[Tensor]:
        # GradScaler.scale takes a tensor or iterates: here is where it can be refused by name.
        remedy = "train in bfloat16, whose range is that of float32: autocast needs no GradScaler then"
        raise check.refuse("loss", "scaled by a GradScaler", "back-propagated as it is", remedy)


class PrivateTraining:
    """A private run, made by `make_private`: fused with `step`, or an ordinary loop with `loss`.

    Both clip each physical batch, and add noise and move the parameters at a logical batch's last one, and only there.
    An error inside a logical batch drops its sums and charges nothing; a new pass over `loader` begins at that batch.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        source: Dataset[Any] | DataLoader[Any],
        plan: TrainingPlan,
        threshold: Threshold[Any],
        *,
        criterion: PerExample | None,
        evaluate: Callable[[Any], Tensor],
        physical_batch_size: int | None,
        seed: int | None,
    ) -> None:
        self.updated = False
        """Whether the last call ended a logical step: for schedulers and averages of the parameters."""
        self._engine, self._optimizers, self._plan, self._threshold = engine, tuple(optimizers), plan, threshold
        self._criterion, self._evaluate = criterion, evaluate
        self._device = engine.device
        self._split = accounting.split(plan.noise_multiplier, threshold.noise_share)
        self._state = threshold.start(len(engine.groups))
        self._history: list[StepRecord] = []
        self._logical: LogicalBatch | None = None
        self._guard = Guard(engine.parameters, self._optimizers)

        sampling, noise, loading = np.random.SeedSequence(seed).spawn(3)
        self._noise = _generator(noise, self._device)
        self.loader = PoissonLoader(
            source,
            PoissonSampler(plan.dataset_size, plan.sample_rate, sampling),
            physical_batch_size=physical_batch_size,
            span=self._steps_of_pass,
            generator=_generator(loading, torch.device("cpu")),
        )
        self._inside = False
        if criterion is not None:
            engine.watch(self._rows_of_next_batch)

    @property
    def num_steps(self) -> int:
        """The logical steps of the whole plan."""
        return self._plan.num_steps

    @property
    def steps_per_epoch(self) -> int:
        """The logical steps in which each example is drawn once on average."""
        return self._plan.steps_per_epoch

    @property
    def history(self) -> tuple[StepRecord, ...]:
        """A record for each logical step done."""
        return tuple(self._history)

    def epsilon(self, delta: float | None = None) -> float:
        """The epsilon spent so far, exactly: by the privacy loss distribution of the steps that were released."""
        delta = self._plan.delta if delta is None else delta
        z = self._plan.noise_multiplier if self._threshold.private else 0.0
        rate, done = self._plan.sample_rate, len(self._history)
        return accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=done, delta=delta)

    def step(self, *batch: Any) -> Tensor:
        """The whole private step for a batch of the loader, or for ``(x, y)``; returns its mean loss (raw), 0-dim."""
        with self._attempt():
            ticket, gradients = self._clip(batch)
            self._take(ticket, gradients)
            if self.updated:
                for optimizer in self._optimizers:
                    optimizer.step()
                self._guard.clear()
        return _mean_loss(gradients, ticket)

    def loss(self, *batch: Any) -> PrivateLoss:
        """The loss of ``(outputs, targets)``, or of a batch that goes through the model here.

        Call its ``backward()``, then ``optimizer.step()`` and ``optimizer.zero_grad()``, at every physical batch: they
        do nothing until the logical batch is complete.
        """
        with self._attempt():
            ticket, gradients = self._clip(batch) if len(batch) == 1 else self._clip_outputs(*batch)
        logical = self._logical

        def hand_over() -> None:
            with self._attempt():
                if logical is None or self._logical is not logical:
                    raise _stale_loss()
                self._take(ticket, gradients)

        return PrivateLoss(_mean_loss(gradients, ticket), hand_over)

    def _clip(self, batch: tuple[Any, ...]) -> tuple[Ticket, ClippedGradients]:
        whole = batch[0] if len(batch) == 1 else batch
        ticket, logical = self._redeem(whole)
        whole = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), whole)
        mask = ticket.mask(self._device)
        return ticket, self._engine.clipped(self._evaluate, whole, logical.clip_norms, mask=mask)

    def _clip_outputs(self, outputs: Any, targets: Any) -> tuple[Ticket, ClippedGradients]:
        if self._criterion is None:
            remedy = (
                "pass the batch, training.loss(batch), or make the training with loss= instead of per_example_loss="
            )
            raise check.refuse("outputs, targets", "given", "left out: per_example_loss calls the model itself", remedy)
        ticket, logical = self._redeem((outputs, targets))
        mask = ticket.mask(self._device)
        return ticket, self._engine.finish(outputs, targets, self._criterion, logical.clip_norms, mask=mask)

    def _redeem(self, batch: Any) -> tuple[Ticket, LogicalBatch]:
        """The ticket of this batch, and the logical batch that it continues or begins."""
        self.updated = False
        step = len(self._history)
        self._refuse_past_plan(step)
        ticket = self.loader.tickets.redeem(batch)
        if self._logical is None or ticket.part == 0:
            clip_norms = self._threshold.clip_norms(self._state, step)
            self._logical = LogicalBatch(clip_norms, self._threshold.count(self._state, step))
        if (ticket.step, ticket.part) != (step, self._logical.parts):
            remedy = "call training.loss(...).backward() for every batch before the next one"
            place = f"part {ticket.part} of step {ticket.step}"
            raise check.refuse("batch", place, f"part {self._logical.parts} of step {step}", remedy)
        return ticket, self._logical

    def _take(self, ticket: Ticket, gradients: ClippedGradients) -> None:
        """Add a physical batch to the sums; after the last one, release them."""
        logical = self._logical
        assert logical is not None
        self._guard.clear()
        logical.add(gradients, ticket)
        if ticket.last:
            self._release(logical)
            self._logical = None
            self.updated = True

    def _release(self, logical: LogicalBatch) -> None:
        summed = mechanism.BoundedSum(logical.sums, self._engine.groups.members, logical.clip_norms)
        noisy = mechanism.release(summed, self._split.gradient, self._noise)
        noisy_unclipped = self._noisy_unclipped(logical)
        step, parameters = len(self._history), self._engine.parameters
        state = self._threshold.update(self._state, step, noisy_unclipped)
        grads = {name: (value / self._plan.batch_size).to(parameters[name].dtype) for name, value in noisy.items()}
        step_size = float(self._optimizers[0].param_groups[0]["lr"])
        # Charged before anyone can see it: an interruption between the two lines costs budget, not privacy.
        self._history.append(StepRecord(step, logical.clip_norms, noisy_unclipped, step_size))
        self._state = state
        self._guard.write(grads)

    def _noisy_unclipped(self, logical: LogicalBatch) -> tuple[float, ...]:
        count, counts = logical.count, logical.counts()
        if count is None or counts is None:
            return ()
        noisy = mechanism.release(counts, self._split.counts, self._noise)["counts"]
        return tuple(value / self._plan.batch_size + count.centre for value in noisy.tolist())

    def _steps_of_pass(self) -> range:
        """The rest of the current epoch (of the plan, when it was given in steps)."""
        done, length = len(self._history), self._plan.steps_per_pass
        self._refuse_past_plan(done)
        return range(done, min((done // length + 1) * length, self._plan.num_steps))

    def _refuse_past_plan(self, step: int) -> None:
        if step >= self._plan.num_steps:
            remedy = "plan more epochs or steps from the start: the noise was chosen for these"
            raise check.refuse("step", step, f"< num_steps = {self._plan.num_steps}: the budget is spent", remedy)

    def _rows_of_next_batch(self) -> int | None:
        """How many examples a forward of the user's own is about to see; None when it is not one to watch."""
        ticket = self.loader.tickets.front
        return None if self._inside or ticket is None else ticket.rows

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Drop the logical batch if anything goes wrong inside: part of it must not be released, nor be mixed up."""
        self._inside = True
        try:
            yield
        except BaseException:
            self._logical = None
            self.loader.abandon()
            raise
        finally:
            self._inside = False


def make_private(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    dataset: Dataset[Any] | DataLoader[Any],
    *,
    loss: PerExample | None = None,
    per_example_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    threshold: Threshold[Any] = PrivateQuantile(0.5),  # noqa: B008 - immutable
    groups: GroupSpec = "flat",
    physical_batch_size: int | None = None,
    data_independent: Sequence[str] = (),
    seed: int | None = None,
) -> PrivateTraining:
    """Train this model privately, with this optimizer, on this data.

    loss: a criterion ``f(outputs, targets)``; a mean is converted to one loss per example where that is exact.
    per_example_loss: ``f(model, batch)`` with one loss per example. Exactly one of the two.
    dataset: map-style, or a DataLoader whose collate function, workers and pinning are kept.
    batch_size: the *expected* number of examples of a step; each joins with probability ``batch_size / len(dataset)``.
    epochs, steps: how long; exactly one of them. A pass over `PrivateTraining.loader` is an epoch, or all the steps.
    epsilon, noise_multiplier: exactly one of them. The noise multiplier is that of gradient and counts together; 0
        means no noise anywhere, and an infinite epsilon.
    delta: 1 / (10 len(dataset)) when left out.
    threshold: where to clip; the median of the gradient norms, learnt privately, when left out.
    groups: which parameters are clipped together: "flat", "per-layer", or patterns of names.
    physical_batch_size: the most examples that go through the model at once; all of the step when left out.
    data_independent: patterns of buffers that a forward pass may change because nothing in the data changes them, such
        as the power iteration of a spectral norm.
    seed: for sampling and noise. Leave it out unless you test: whoever knows it can subtract the noise.

    Move the model to its device first.

    >>> from torch.utils.data import TensorDataset
    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = TensorDataset(torch.zeros(100, 3), torch.zeros(100, dtype=torch.long))
    >>> privacy = {"noise_multiplier": 1.0, "delta": 1e-3}
    >>> training = make_private(model, optimizer, data, loss=nn.CrossEntropyLoss(), batch_size=10, steps=5, **privacy)
    >>> for x, y in training.loader:
    ...     raw_loss = training.step(x, y)
    >>> len(training.history), round(training.epsilon(), 2)
    (5, 1.19)
    """
    engine = Engine(model, groups=groups, data_independent=data_independent)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check_optimizers(optimizers, engine)
    if (loss is None) == (per_example_loss is None):
        remedy = "loss= is a criterion of outputs and targets, per_example_loss= a function of model and batch"
        raise check.refuse("loss, per_example_loss", (loss, per_example_loss), "one given and one left out", remedy)
    criterion = None if loss is None else per_example(loss)
    if physical_batch_size is not None:
        check.count("physical_batch_size", physical_batch_size, "it is the most examples in memory at once")
    return PrivateTraining(
        engine,
        optimizers,
        dataset,
        plan_training(
            dataset_size(dataset),
            batch_size,
            epochs=epochs,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            private=threshold.private,
        ),
        threshold,
        criterion=criterion,
        evaluate=_evaluation(engine.model, criterion, per_example_loss),
        physical_batch_size=physical_batch_size,
        seed=seed,
    )


def _check_optimizers(optimizers: Sequence[Optimizer], engine: Engine) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            remedy = "pass the torch optimizer itself, before any wrapper"
            raise check.refuse("optimizer", type(optimizer).__name__, "a torch.optim.Optimizer, or a list", remedy)
        if isinstance(optimizer, LBFGS):
            remedy = "use SGD, Adam or another that steps on a gradient it is given"
            raise check.refuse("optimizer", "LBFGS", "one that does not compute gradients by a closure", remedy)
    names = {id(parameter): name for name, parameter in engine.parameters.items()}
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    if held - set(names):
        remedy = "give it the parameters of the model that is made private"
        raise check.refuse(
            "optimizer", f"over {len(held - set(names))} others", "over the model's parameters alone", remedy
        )
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        remedy = "give the others to an optimizer, or freeze them by requires_grad_(False)"
        raise check.refuse("optimizer", f"without {missing}", "over every trainable parameter of the model", remedy)


def _evaluation(
    model: nn.Module, criterion: PerExample | None, per_example_loss: Callable[[nn.Module, Any], Tensor] | None
) -> Callable[[Any], Tensor]:
    """From a batch to its losses, through the model."""

    def evaluate(batch: Any) -> Tensor:
        if per_example_loss is not None:
            return per_example_loss(model, batch)
        assert criterion is not None
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            remedy = "collate to (inputs, targets), or pass per_example_loss= instead of loss="
            raise check.refuse("batch", type(batch).__name__, "a tuple or list that ends with the targets", remedy)
        *inputs, targets = batch
        return criterion(call(model, inputs[0] if len(inputs) == 1 else tuple(inputs)), targets)

    return evaluate


def _stale_loss() -> ValueError:
    remedy = "call training.loss(...).backward() once for each batch, before the next one"
    return check.refuse("this loss", "stale", "the latest, not yet back-propagated", remedy)


def _mean_loss(gradients: ClippedGradients, ticket: Ticket) -> Tensor:
    return torch.where(gradients.mask, gradients.losses, 0).sum() / ticket.rows


def _generator(seed: np.random.SeedSequence, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(int(seed.generate_state(1, np.uint64)[0]))

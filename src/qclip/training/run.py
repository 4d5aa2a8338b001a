"""A private run: `PrivateTraining`, made by `qclip.make_private`."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from qclip import _validate as check
from qclip import accounting, theory
from qclip.engine import ClippedGradients, Engine
from qclip.engine.batch import to_device_async
from qclip.engine.compiled.driver import Compiled
from qclip.engine.driver import Choice
from qclip.schedules import Schedule
from qclip.thresholds import Conditions, Threshold
from qclip.thresholds.threshold import at, describe
from qclip.training import certificate, checkpoint, noise, rows
from qclip.training.batch_proof import FetchProof
from qclip.training.certificate import Departures
from qclip.training.data_fingerprint import DataFingerprint
from qclip.training.fetch import Fetch
from qclip.training.guard import Guard
from qclip.training.history import History, StepRecord
from qclip.training.logical_batch import LogicalBatch, Noise
from qclip.training.losses import PerExample
from qclip.training.lost_threshold import WINDOW, LostThreshold, explain, lost_groups
from qclip.training.noise_source import NoiseSource
from qclip.training.plan import TrainingPlan
from qclip.training.sampling import Ticket, TicketLoader, dataset_of, dataset_size, sampler


@dataclass(frozen=True)
class Evaluation:
    """How a batch becomes one loss per example: through the model, or from its outputs with a criterion."""

    losses: Callable[[Any], Tensor]
    """Of a whole batch."""
    criterion: PerExample | None
    """None where only a whole batch will do."""
    rows_per_example: int = 1


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

    def __truediv__(self, number: object) -> "PrivateLoss":
        # What loops that accumulate gradients do, and Accelerate's backward.
        remedy = "leave it: physical batches are added up, and divided by the batch size once"
        raise check.refuse("loss", f"divided by {number!r}", "back-propagated as it is", remedy)


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
        evaluation: Evaluation,
        *,
        step_size: Schedule | float | None,
        normalize: bool,
        physical_batch_size: int | None,
        compiled: Compiled | None,
        seed: int | None,
    ) -> None:
        self.updated = False
        """Whether the last call ended a logical step: for schedulers and averages of the parameters."""
        self._engine, self._optimizers, self._plan, self._threshold = engine, tuple(optimizers), plan, threshold
        self._evaluation, self._step_size, self._normalize = evaluation, step_size, normalize
        self._device = engine.device
        self._compiled = compiled
        self._split = accounting.split(plan.noise_multiplier, threshold.noise_share)
        self._dims = noise.group_dims(engine.parameters, engine.groups.members, len(engine.groups))
        threshold.check(Conditions(plan.batch_size, plan.num_steps, plan.noise_multiplier, self._dims))
        self._physical_batch_size = physical_batch_size
        self._state = threshold.start(len(engine.groups))
        self._records: list[StepRecord] = []
        self._history = History(self._records)
        self._said_lost = False
        self._logical: LogicalBatch | None = None
        self._departures = Departures()
        self._guard = Guard(engine.parameters, self._optimizers, applying=self._departures.see)
        self._random_states: dict[str, Any] | None = None
        self.epsilon_curve = accounting.EpsilonCurve(
            noise_multiplier=self._accounted,
            sample_rate=plan.sample_rate,
            num_steps=plan.num_steps,
            delta=plan.delta,
            accountant=plan.accountant,
        )
        """Epsilon against steps done: `epsilon` on a grid, rounded up, for progress and records."""

        sampling_seed, noise_seed = np.random.SeedSequence(seed).spawn(2)
        self._noise = NoiseSource(noise_seed)
        self.loader = TicketLoader(
            source,
            sampler(plan.sampling, dataset_size(source), plan.batch_size, plan.sample_rate, sampling_seed),
            physical_batch_size=physical_batch_size,
            span=self._steps_of_pass,
            before_step=self._note_random_states,
            rows_per_example=evaluation.rows_per_example,
        )
        """The batches of the data, drawn for each step: one pass is one epoch, or the whole plan."""
        self._fetch_proof = FetchProof(Fetch.of(source), engine, self.loader.examples)
        self._data = DataFingerprint(dataset_of(source))
        self._inside = False
        if evaluation.criterion is not None:
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
    def finished(self) -> bool:
        """Whether every step of the plan is done: another pass would be refused."""
        return len(self._records) == self._plan.num_steps

    @property
    def plan(self) -> TrainingPlan:
        """The public constants of the run."""
        return self._plan

    @property
    def threshold(self) -> Threshold[Any]:
        """Where it clips; what it has learnt is in the history."""
        return self._threshold

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups of parameters that are clipped together."""
        return self._engine.groups.names

    @property
    def history(self) -> History:
        """A record for each logical step done: a view, read like a tuple, that grows with the run."""
        return self._history

    @property
    def lost_threshold(self) -> str:
        """Whether the threshold has lost its quantile: since when, in what way and what to do; empty while it has not.

        From released values, like `history`, whose records say it of each step.
        """
        return explain(self._records, self._threshold, self.groups)

    @property
    def noise_multipliers(self) -> accounting.Split:
        """The noise of the gradient sum and of the counts, each relative to its own sensitivity."""
        return self._split

    def epsilon(self, delta: float | None = None) -> float:
        """The epsilon spent so far, exactly: what the accountant says of the steps that were released."""
        return accounting.epsilon(
            noise_multiplier=self._accounted,
            sample_rate=self._plan.sample_rate,
            steps=len(self._records),
            delta=self._plan.delta if delta is None else delta,
            accountant=self._plan.accountant,
        )

    @property
    def _accounted(self) -> float:
        """The noise multiplier that counts: none, where the threshold sees raw norms."""
        return self._plan.noise_multiplier if self._threshold.private else 0.0

    def certificate(
        self, assumptions: theory.Assumptions, confidence: float = 0.95, *, p_lo: float | None = None
    ) -> theory.Bound:
        """What the run so far has achieved, by `qclip.theory.certificate`, from its own record.

        For what the theorem is about, and refused otherwise: plain SGD (no momentum, no weight decay) that applied
        every gradient; step sizes that were fixed before the run, so not normalized ones, nor those of a function or a
        scheduler that may react to it; flat clipping at a threshold that counts unclipped examples and does not look
        at a step's own. ``p_lo``: a lower bound on every step's unclipped fraction, where one is known; else the record
        has to show one.
        """
        certificate.require_covered(
            self._history,
            self._threshold,
            self._engine.parameters.values(),
            step_size=self._step_size,
            normalize=self._normalize,
            departure=self._departures.so_far(applied=self._guard.applied),
            plan=self._plan,
            examples=self.loader.examples,
        )
        return certificate.certify(
            assumptions,
            self._history,
            self._threshold,
            self._plan,
            count=self._threshold.ask(self._state, len(self._records)).count,
            noise=self._split,
            dims=self._dims,
            p_lo=p_lo,
            confidence=confidence,
        )

    def step(self, *batch: Any) -> Tensor:
        """The whole private step for a batch of the loader, or for ``(x, y)``; returns its mean loss (raw), 0-dim."""
        with self._attempt():
            ticket, gradients = self._clip(batch)
            self._take(ticket, gradients)
            if self.updated:
                for optimizer in self._optimizers:
                    optimizer.step()
                self._guard.clear()
        self._warn_if_lost(stacklevel=3)
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
            self._warn_if_lost(stacklevel=4)

        return PrivateLoss(_mean_loss(gradients, ticket), hand_over)

    def state_dict(self) -> dict[str, Any]:
        """Qclip's own state, as of the last completed logical step: plain data.

        Keep it as secret as the data until the run is complete: it holds the seeds of sampling and noise, with which
        the noise could be subtracted, and a fingerprint of the data. That of a complete run holds neither.
        """
        self._guard.refuse_pending("the state is taken")
        return {
            **self._identity(),
            "execution": self._execution() if self._engine.draws else None,
            "threshold_state": self._state,
            "history": [asdict(record) for record in self._records],
            "departure": self._departures.so_far(applied=self._guard.applied),
            "secrets": None if self.finished else self._secrets(),
        }

    def _secrets(self) -> dict[str, Any]:
        seed = self.loader.sampler.seed
        between = self._logical is None and self.loader.tickets.front is None
        return {
            "sampling": {"entropy": seed.entropy, "spawn_key": tuple(seed.spawn_key)},
            "data": self._data.under(seed),
            "noise": {"kind": self._device.type, **self._noise.state_dict()},
            # In the middle of a logical batch the run goes back to where that batch was fetched.
            "random": checkpoint.random_states() if between else self._random_states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, of this run or of one made with the same arguments and the same data."""
        self._require_same_run(state)
        self._logical = None
        self.loader.abandon()
        self._guard.clear()
        self.updated = False
        self._records[:] = [_record(row) for row in state["history"]]  # in place: the history stays a view of it
        self._said_lost = any(record.lost for record in self._records)
        self._state = state["threshold_state"]
        self._engine.draws |= state["execution"] is not None
        self._departures.begin(state["departure"])
        secrets = state["secrets"]
        if secrets is None:
            return
        self.loader.reseed(_sampling_seed(secrets))
        if secrets["noise"].get("kind") == self._device.type:
            self._noise.load_state_dict(secrets["noise"])
        else:
            # Another kind of device rounds otherwise, so this cannot become the run that would have been; and noise
            # that is added to two different sums can be subtracted. So fresh noise, whatever the seed was.
            self._noise = NoiseSource()
        if secrets["random"] is not None:
            checkpoint.restore_random_states(secrets["random"])

    def save(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Write a checkpoint: this run, its model and optimizers, and whatever else has a ``state_dict``, by name.

        The file is replaced in one go. It holds what `state_dict` says about secrets; only its owner can read it.
        """
        checkpoint.write(
            path,
            {
                "training": self.state_dict(),
                "model": self._engine.model.state_dict(),
                "optimizers": [_named_state(optimizer) for optimizer in self._optimizers],
                "others": {name: other.state_dict() for name, other in self._foreign(others).items()},
            },
        )

    def load(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Go on from a checkpoint of `save`, with the same others: the run that would have been, bit for bit on a CPU.

        Refused, and nothing touched, where the file is damaged, of a newer version, of another run or of other data.
        """
        content = checkpoint.read(path, self._device)
        mine = self._foreign(others)
        if set(content["others"]) != set(mine):
            remedy = "pass what was saved, under the same names"
            raise check.refuse("others", sorted(mine), f"{sorted(content['others'])}, as in the file", remedy)
        self._require_same_run(content["training"])
        _require_same_tensors(self._engine.model, content["model"])
        mine_now = [_shape(_named_state(optimizer)) for optimizer in self._optimizers]
        if (saved := [_shape(named) for named in content["optimizers"]]) != mine_now:
            remedy = "make the training with the same optimizers, over the same groups of parameters"
            raise check.refuse("optimizers", mine_now, f"{saved}, as in the file", remedy)
        self._engine.model.load_state_dict(content["model"])
        for optimizer, named in zip(self._optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(named["state"])
        for name, other in mine.items():
            other.load_state_dict(content["others"][name])
        self.load_state_dict(content["training"])  # last: making the others draws from generators

    def _foreign(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """The others that are not saved anyway."""
        own = (self, self._engine.model, *self._optimizers)
        return {name: other for name, other in others.items() if not any(other is mine for mine in own)}

    def _identity(self) -> dict[str, Any]:
        return {
            "plan": asdict(self._plan),
            "threshold": describe(self._threshold),
            "groups": dict(self._engine.groups.members),
            "rows_per_example": self._evaluation.rows_per_example,
            "normalize": self._normalize,
            "schedules": self._schedules(),
        }

    def _execution(self) -> dict[str, Any]:
        """What decides which random numbers an example gets in the forward pass."""
        return {"physical_batch_size": self._physical_batch_size, "compile": self._compiled is not None}

    def _require_same_run(self, state: Mapping[str, Any]) -> None:
        for part, mine in self._identity().items():
            if state.get(part) == mine:
                continue
            name, given, value = part, mine, state.get(part)
            if isinstance(mine, dict) and isinstance(value, dict):
                key = next(key for key in [*mine, *value] if mine.get(key) != value.get(key))
                name, given, value = f"{part}[{key!r}]", mine.get(key), value.get(key)
            remedy = "make the training with the same arguments, or start a new run"
            raise check.refuse(name, given, f"{value!r}, as in the checkpoint", remedy)
        execution = self._execution()
        for name, value in (state["execution"] or {}).items():
            if execution[name] != value:
                remedy = (
                    "give it the same: the model draws random numbers, and with others the steps since the checkpoint "
                    "would be released again with the same noise, which could then be subtracted; or start a new run"
                )
                raise check.refuse(name, execution[name], f"{value!r}, as in the checkpoint", remedy)
        if len(state["history"]) < len(self._records):
            remedy = "make a new training to go back: the steps done since would be forgotten, but not their cost"
            raise check.refuse(
                "steps of the state", len(state["history"]), f">= {len(self._records)}, those done", remedy
            )
        secrets = state["secrets"]
        if secrets is not None:
            self._data.require_same(_sampling_seed(secrets), secrets["data"])

    def _schedules(self) -> dict[str, list[float]]:
        """Some values of every schedule: a function cannot be compared, and the noise must not serve two runs."""
        last = self._plan.num_steps - 1
        found = {"step_size": self._step_size} | vars(self._threshold)
        steps = sorted({0, last // 3, 2 * last // 3, last})
        return {name: [float(each(t)) for t in steps] for name, each in found.items() if callable(each)} | (
            {} if self._step_size is None or callable(self._step_size) else {"step_size": [float(self._step_size)]}
        )

    def _clip(self, batch: tuple[Any, ...]) -> tuple[Ticket, ClippedGradients]:
        whole = batch[0] if len(batch) == 1 else batch
        ticket, logical = self._redeem(whole)
        gradients = self._gradients(self._placed(whole, ticket.rows), logical.choice, ticket.mask(self._device))
        if self._newly_proven() is not None:
            self._fetch_proof.require_independent(
                ticket.indices,
                lambda used, rows: self._evaluation.losses(self._placed(used, rows)),
                whole,
                ticket.batch,
            )
        return ticket, gradients

    def _newly_proven(self) -> Any:
        """What the engine has proven since this was asked last: then the way of the batch to it is proven, too."""
        proven, self._engine.proven = self._engine.proven, None
        return proven

    def _gradients(self, batch: Any, choice: Choice, mask: Tensor) -> ClippedGradients:
        if self._compiled is None:
            return self._engine.clipped(self._evaluation.losses, batch, choice, mask=mask)
        return self._compiled.clipped(self._evaluation.losses, batch, choice, mask=mask, wait=False)

    def _clip_outputs(self, outputs: Any, targets: Any) -> tuple[Ticket, ClippedGradients]:
        if self._evaluation.criterion is None:
            remedy = "pass the batch, training.loss(batch)"
            bound = (
                "left out: with per_example_loss, or several rows per example, the batch goes through the model here"
            )
            raise check.refuse("outputs, targets", "given", bound, remedy)
        ticket, logical = self._redeem((outputs, targets))
        mask = ticket.mask(self._device)
        if self._compiled is not None:
            self._compiled.say(
                "the model was called outside: training.step(batch) and training.loss(batch) are compiled"
            )
        self._engine.proven = None  # of raw norms, which some thresholds look at first
        gradients = self._engine.finish(outputs, targets, self._evaluation.criterion, logical.choice, mask=mask)
        if (proven := self._newly_proven()) is not None:
            evaluate, used = proven
            self._fetch_proof.require_independent(ticket.indices, lambda used, _: evaluate(used), used, ticket.batch)
        return ticket, gradients

    def _placed(self, batch: Any, examples: int) -> Any:
        """The batch on the model's device, as [examples, rows, ...] where an example has several rows."""
        batch = pytree.tree_map_only(Tensor, lambda tensor: to_device_async(tensor, self._device), batch)
        k = self._evaluation.rows_per_example
        return batch if k == 1 else rows.split(batch, examples, k)

    def _redeem(self, batch: Any) -> tuple[Ticket, LogicalBatch]:
        """The ticket of this batch, and the logical batch that it continues or begins."""
        self.updated = False
        step = len(self._records)
        self._refuse_past_plan(step)
        self._guard.refuse_pending("the next batch")
        ticket = self.loader.tickets.redeem(batch)
        if self._logical is None or ticket.part == 0:
            self._logical = self._begin_step(step)
        if (ticket.step, ticket.part) != (step, self._logical.parts):
            remedy = "call training.loss(...).backward() for every batch before the next one"
            place = f"part {ticket.part} of step {ticket.step}"
            raise check.refuse("batch", place, f"part {self._logical.parts} of step {step}", remedy)
        return ticket, self._logical

    def _begin_step(self, step: int) -> LogicalBatch:
        state, threshold = self._state, self._threshold
        question = threshold.ask(state, step)
        if threshold.private:
            return LogicalBatch(threshold.clip_norms(state, step), question, keep_norms=False)
        if threshold.raw_access == "dataset":
            return LogicalBatch(threshold.clip_norms(state, step, self._norms_of_all()), question, keep_norms=True)

        def choose(raw_norms: Tensor) -> tuple[float, ...]:
            return threshold.clip_norms(state, step, raw_norms.cpu().numpy())

        return LogicalBatch(choose, question, keep_norms=True)

    def _norms_of_all(self) -> np.ndarray:
        """The raw norms of the whole data set at the current parameters, [examples, groups]."""
        found = []
        size, expected = self.loader.examples, self._plan.batch_size
        chunk = min(expected, self._physical_batch_size or expected)
        for start, batch in zip(range(0, size, chunk), self.loader.everything(chunk), strict=True):
            whole = self._placed(batch, min(chunk, size - start))
            ones = torch.ones(min(chunk, size - start), dtype=torch.bool, device=self._device)
            found.append(self._gradients(whole, 1.0, ones).group_norms.cpu().numpy())
        return np.concatenate(found)

    def _take(self, ticket: Ticket, gradients: ClippedGradients) -> None:
        """Add a physical batch to the sums; after the last one, release them."""
        logical = self._logical
        assert logical is not None
        self._departures.begin(self._departures.so_far(applied=self._guard.applied))  # before the guard forgets
        self._guard.clear()
        logical.add(gradients, ticket.size, last=ticket.last)
        if ticket.last:
            self._release(logical)
            self._logical = None
            self.updated = True

    def _release(self, logical: LogicalBatch) -> None:
        step, parameters = len(self._records), self._engine.parameters
        if logical.hopeless:
            self._refuse_hopeless(step)
        gradient, counts = logical.gradient(self._engine.groups.members, self._dims), logical.counts()
        scale = gradient.l2_bound if self._normalize else 1.0  # public, like everything it depends on
        divisor = self._plan.batch_size * scale
        noisy = noise.release(gradient, self._split.gradient, self._noise, divisor=divisor, like=parameters)
        noisy_counts = {} if counts is None else noise.release(counts, self._split.counts, self._noise)
        sizes = Noise(
            noise.noise_stds(gradient, self._split.gradient),
            0.0 if counts is None else noise.noise_stds(counts, self._split.counts)[0],
        )
        answer = logical.answer(noisy, noisy_counts, sizes, self._plan.batch_size, divisor=divisor)
        noisy_unclipped = self._threshold.unclipped(self._state, step, answer)
        state = self._threshold.update(self._state, step, answer)
        if self._step_size is not None:
            _set_step_size(self._optimizers, at(self._step_size, step))
        rate = float(self._optimizers[0].param_groups[0]["lr"])
        self._departures.expect(step, rate)
        record = StepRecord(step, logical.clip_norms, noisy_unclipped, rate / scale)
        lost = lost_groups([*self._records[1 - WINDOW :], record], self._threshold, self.groups)
        # Charged before anyone can see it: an interruption between the two lines costs budget, not privacy.
        self._records.append(replace(record, lost=lost))
        self._state = state
        self._guard.write(noisy)

    def _warn_if_lost(self, stacklevel: int) -> None:
        """Once a run, after the step is done: whoever turns warnings into errors has lost nothing."""
        if self._records and self._records[-1].lost and not self._said_lost:
            self._said_lost = True
            warnings.warn(self.lost_threshold, LostThreshold, stacklevel=stacklevel)

    def _refuse_hopeless(self, step: int) -> None:
        """Nothing but noise can come of a batch without a finite gradient; say so where the model is at fault."""
        diverged = not all(bool(p.isfinite().all()) for p in self._engine.parameters.values())
        if step > 0 and not diverged:
            return  # an unlucky draw of bad examples: they count as clipped, and nobody learns of it
        where = "the parameters are not finite" if diverged else "at the first step already"
        remedy = (
            "lower the learning rate" if diverged else "look for NaN in the inputs, the loss or the initial weights"
        )
        raise check.refuse("gradients", f"not finite for any example, {where}", "finite", remedy)

    def _steps_of_pass(self) -> range:
        """The rest of the current epoch (of the plan, when it was given in steps)."""
        done, length = len(self._records), self._plan.steps_per_pass
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

    def _note_random_states(self) -> None:
        self._random_states = checkpoint.random_states()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Drop the logical batch if anything goes wrong inside: part of it must not be released, nor be mixed up."""
        try:
            self._inside = True
            yield
        except BaseException:
            self._logical = None
            self.loader.abandon()
            raise
        finally:
            self._inside = False


def _stale_loss() -> ValueError:
    remedy = "call training.loss(...).backward() once for each batch, before the next one"
    return check.refuse("this loss", "stale", "the latest, not yet back-propagated", remedy)


def _mean_loss(gradients: ClippedGradients, ticket: Ticket) -> Tensor:
    return torch.where(gradients.mask, gradients.losses, 0).sum() / ticket.rows


def _set_step_size(optimizers: Sequence[Optimizer], value: float) -> None:
    value = check.positive("step_size", value, "a schedule gives the learning rate of each step")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


def _sampling_seed(secrets: Mapping[str, Any]) -> np.random.SeedSequence:
    sampling = secrets["sampling"]
    return np.random.SeedSequence(sampling["entropy"], spawn_key=sampling["spawn_key"])


def _record(row: Mapping[str, Any]) -> StepRecord:
    lost = row.get("lost", ())  # older checkpoints do not say
    return StepRecord(row["step"], tuple(row["tau"]), tuple(row["noisy_unclipped"]), row["step_size"], tuple(lost))


def _named_state(optimizer: Optimizer) -> dict[str, Any]:
    return {"class": type(optimizer).__name__, "state": optimizer.state_dict()}


def _shape(named: Mapping[str, Any]) -> tuple[str, list[int]]:
    """What must agree: the class, and the number of parameters of each group."""
    return named["class"], [len(group["params"]) for group in named["state"]["param_groups"]]


def _require_same_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse before anything is loaded: a model that has taken half of another is no use."""
    mine = {name: tuple(x.shape) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    theirs = {name: tuple(x.shape) for name, x in state.items() if isinstance(x, Tensor)}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            remedy = "build the model as it was when the checkpoint was written"
            raise check.refuse(f"shape of {name}", mine.get(name), f"{theirs.get(name)}, as in the file", remedy)

"""A private run: `PrivateTraining`, the stateful shell around the pure step."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from qclip import _validate as check
from qclip import accounting, theory
from qclip._display import html_table
from qclip._validate import Refusal
from qclip.engine import ClippedGradients, Engine
from qclip.engine.compiled.driver import Compiled
from qclip.engine.randomness import RandomState
from qclip.schedules import Schedule
from qclip.thresholds import Conditions, Threshold
from qclip.thresholds.threshold import at, describe
from qclip.training import certificate, checkpoint, overview, recording
from qclip.training.auto_step_size import AutoStepSize
from qclip.training.batch_proof import Fetch, FetchProof
from qclip.training.certificate import Departures
from qclip.training.clipper import Clipper, Evaluation
from qclip.training.data_fingerprint import DataFingerprint
from qclip.training.dataset import dataset_of, dataset_size
from qclip.training.guard import Guard
from qclip.training.history import History, StepRecord, record_of
from qclip.training.loader import Ticket, TicketLoader
from qclip.training.losses import PrivateLoss, stale_loss
from qclip.training.lost_threshold import WINDOW, LostThreshold, explain, lost_groups
from qclip.training.noise import NoiseSource, group_dims
from qclip.training.plan import TrainingPlan
from qclip.training.ranks import LostRank, Ranks, checksums, seed_sequence
from qclip.training.rate_watch import RateWatch
from qclip.training.recording import RecordedSampler
from qclip.training.sampling import sampler
from qclip.training.shards import Shards
from qclip.training.step import StepRelease, StepRule, StepState, ask, release
from qclip.training.sums import Key, LogicalStep, RawSums


class PrivateTraining:
    """A private run, made by `make_private`: call `step` on each batch, or `loss` in an ordinary loop.

    * Each physical batch is clipped. Noise is added, and the parameters move, only at the last of a logical batch.
    * An error inside a logical batch drops its sums and spends nothing; a new pass over `loader` begins at that batch.
    * `history`, `epsilon` and `lost_threshold` are released or public. Losses are raw.
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
        step_size: Schedule | float | AutoStepSize | None,
        rescale_to_unit_norm: bool,
        physical_batch_size: int | None,
        compiled: Compiled | None,
        seed: int | None,
        ranks: Ranks,
        shards: Shards,
    ) -> None:
        self.seeded = seed is not None
        """Whether sampling and noise follow from a given seed: whoever knows it can subtract the noise."""
        self.updated = False
        """Whether the last call completed a logical step: the time to step schedulers and parameter averages."""
        self._engine, self._optimizers, self._plan = engine, tuple(optimizers), plan
        self._ranks, self._shards = ranks, shards
        self._evaluation, self._step_size, self._physical_batch_size = evaluation, step_size, physical_batch_size
        self._is_compiled, members = compiled is not None, engine.groups.members
        dims = group_dims(engine.parameters, members, len(engine.groups))
        conditions = Conditions(plan.batch_size, plan.num_steps, plan.noise_multiplier, dims)
        threshold.check(conditions)
        self._rule = StepRule(
            threshold=threshold,
            members={Key("gradient", name): group for name, group in members.items()},
            dims=dims,
            dtypes={Key("gradient", name): parameter.dtype for name, parameter in shards.parameters.items()},
            batch_size=plan.batch_size,
            noise=accounting.split(plan.noise_multiplier, threshold.share(conditions)),
            rescale_to_unit_norm=rescale_to_unit_norm,
            places={Key("gradient", name): place for name, place in shards.places().items()},
            mechanism=None if (recorder := recording.current()) is None else recorder.release,
        )
        self._threshold_state = threshold.start(len(engine.groups))
        self._records: list[StepRecord] = []
        self._history = History(self._records)
        self._warned_lost = False
        self._rate_watch = RateWatch(self._optimizers)
        self._logical: LogicalStep | None = None
        self._departures = Departures()
        self._guard = Guard(shards.parameters, self._optimizers, applying=self._departures.see)
        for optimizer in self._optimizers:
            shards.follow(optimizer)
        self.epsilon_curve = accounting.EpsilonCurve(
            noise_multiplier=self._accounted,
            sample_rate=plan.sample_rate,
            num_steps=plan.num_steps,
            delta=plan.delta,
            accountant=plan.accountant,
        )
        """Epsilon as a function of steps done: `epsilon` on a grid, rounded up, for progress and records."""

        if recorder is not None and seed is None:
            seed = recorder.seed
        sampling_seed, noise_seed = seed_sequence(seed, ranks).spawn(2)
        self._noise = NoiseSource(noise_seed)
        draws = sampler(plan.sampling, dataset_size(source), plan.batch_size, plan.sample_rate, sampling_seed)
        self.loader = TicketLoader(
            source,
            draws if recorder is None else RecordedSampler(draws, recorder),
            plan,
            done=self._history,
            physical_batch_size=physical_batch_size,
            rows_per_example=evaluation.rows_per_example,
            ranks=ranks,
        )
        """The physical batches of the data: one pass is one epoch, or the whole plan if it was given in steps.

        On several ranks, those of this rank; all ranks have equally many.
        """
        fetch_proof = FetchProof(Fetch.of(source), engine, self.loader.num_examples)
        self._clipper = Clipper(engine, compiled, evaluation, fetch_proof)
        self._data = DataFingerprint(dataset_of(source))
        if ranks.size > 1:
            ranks.require_same(self._facts(seed))
        if evaluation.criterion is not None:
            engine.watch(self._slots_of_next_batch)
        if recorder is not None:
            recorder.begin(self)

    def __repr__(self) -> str:
        lines = [f"  {name:<10} {text}" for name, text in self._overview()]
        return "\n".join([overview.title(self.model), *lines])

    def _repr_html_(self) -> str:
        return html_table((), self._overview(), caption=overview.title(self.model))

    def _overview(self) -> list[tuple[str, str]]:
        return overview.rows(
            self.plan,
            self.threshold,
            self.history,
            epsilon=self.epsilon_curve,
            num_groups=len(self.groups),
            lost=self.lost_threshold,
        )

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._engine.model

    @property
    def rank(self) -> int:
        """The number of this process among those that share the run; files and logs are those of rank 0."""
        return self._ranks.rank

    @property
    def num_steps(self) -> int:
        """The number of logical steps of the plan."""
        return self._plan.num_steps

    @property
    def steps_per_epoch(self) -> int:
        """The number of logical steps in which an example is drawn once on average."""
        return self._plan.steps_per_epoch

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan are done. Another pass is then refused."""
        return len(self._records) == self._plan.num_steps

    @property
    def plan(self) -> TrainingPlan:
        """The public constants of the run."""
        return self._plan

    @property
    def settings(self) -> dict[str, Any]:
        """The choices that are not in the plan, as plain data for records. Public: the seed is not among them."""
        rate, first = self._step_size, self._optimizers[0]
        found, given = isinstance(rate, AutoStepSize), first.defaults["lr"] if rate is None else rate
        return {
            "optimizer": ", ".join(type(optimizer).__name__ for optimizer in self._optimizers),
            "lr": None if found else float(given) if isinstance(given, float | int | Tensor) else repr(given),
            "rescale_to_unit_norm": self._rule.rescale_to_unit_norm,
            "rows_per_example": self._evaluation.rows_per_example,
            **self._execution(),
        }

    @property
    def threshold(self) -> Threshold[Any]:
        """The threshold, as it was given. `history` has its clip norms."""
        return self._rule.threshold

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups of parameters; each group is clipped together."""
        return self._engine.groups.names

    @property
    def history(self) -> History:
        """The records of the logical steps done: a read-only view that grows with the run."""
        return self._history

    @property
    def lost_threshold(self) -> str:
        """The reason and the remedy if the threshold has lost its quantile; otherwise empty. From released values."""
        return explain(self._records, self._rule.threshold, self.groups)

    @property
    def noise_multipliers(self) -> accounting.Split:
        """The noise multipliers of the gradient sum and of the counts, each relative to its own sensitivity."""
        return self._rule.noise

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon spent so far, for the steps released; ``delta`` is by default that of the plan."""
        return accounting.epsilon(
            noise_multiplier=self._accounted,
            sample_rate=self._plan.sample_rate,
            steps=len(self._records),
            delta=self._plan.delta if delta is None else delta,
            accountant=self._plan.accountant,
        )

    @property
    def _accounted(self) -> float:
        """The noise multiplier for the accountant: 0 if the threshold sees raw norms."""
        return self._plan.noise_multiplier if self._rule.threshold.private else 0.0

    def certificate(
        self, assumptions: theory.Assumptions, confidence: float = 0.95, *, p_lo: float | None = None
    ) -> theory.Certificate:
        """Return the bound on a weighted mean of ``||grad f||^2`` that the record so far certifies.

        The theorem that covers the run is chosen and named, and so is the mean (`qclip.theory.Certificate`). Learning
        rates and schedules may react to earlier steps, but not to the examples of their own step.

        Args:
            assumptions: The constants of the problem (`qclip.theory.Assumptions`).
            confidence: The probability with which the bound on this run, ``this_run``, holds.
            p_lo: A lower bound on the unclipped fraction of every step, if one is known: then plain SGD gets the bound
                on the plain mean, and thresholds that count nothing get one at all.

        Raises:
            qclip.Refusal: No theorem covers the run, by the condition that it lacks: SGD with one momentum, no weight
                decay, at the recorded learning rate, and every gradient applied; a learning rate that was not found
                from the gradient of its own step; flat clipping at a threshold that does not look at a step's own
                examples; the clipped fraction counted at every step, or ``p_lo``; float32 or float64.
        """
        run = certificate.covered(
            assumptions,
            self._history,
            self._rule.threshold,
            self._engine.parameters.values(),
            step_size=self._step_size,
            rescale_to_unit_norm=self._rule.rescale_to_unit_norm,
            departures=self._departures,
            applied=self._guard.applied,
            plan=self._plan,
            num_examples=self.loader.num_examples,
            num_groups=len(self.groups),
            p_lo=p_lo,
        )
        return certificate.certify(
            run,
            assumptions,
            self._history,
            self._plan,
            noise_multiplier=self._rule.noise.gradient,
            dim=sum(self._rule.dims),
            p_lo=p_lo,
            confidence=confidence,
        )

    def report(self, path: str | os.PathLike[str], **about: Any) -> Path:
        """Write the report of the run so far, a self-contained page; the same as ``qclip.report(training, path, ...)``.

        Args:
            path: The file of the page.
            about: What the page says of the run (`qclip.report`), such as ``held_out={"accuracy": 0.9}``.

        Returns:
            The path.
        """
        # By the public door: reports stand above the library, which imports none of them.
        return import_module("qclip").report(self, path, **about)

    def step(self, *batch: Any) -> Tensor:
        """Train on a physical batch of `loader`, given as ``batch`` or ``x, y``; return its raw mean loss, 0-dim."""
        with self._attempt():
            ticket, gradients = self._clip(batch)
            self._take(ticket, gradients)
            if self.updated:
                for optimizer in self._optimizers:
                    optimizer.step()
                self._guard.clear()
        self._warn(stacklevel=3)
        return _mean_loss(gradients, ticket)

    def loss(self, *batch: Any) -> PrivateLoss:
        """Return the loss of ``(outputs, targets)``, or of a whole batch, on which qclip runs the model.

        Call its ``backward()``, then ``optimizer.step()`` and ``optimizer.zero_grad()``, at every physical batch: the
        optimizer moves nothing until the logical batch is complete.
        """
        with self._attempt():
            ticket, gradients = self._clip(batch) if len(batch) == 1 else self._clip_outputs(*batch)
        logical = self._logical

        def hand_over() -> None:
            with self._attempt():
                if logical is None or self._logical is not logical:
                    raise stale_loss()
                self._take(ticket, gradients)
            self._warn(stacklevel=4)

        return PrivateLoss(_mean_loss(gradients, ticket), hand_over)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the last completed logical step, as plain data.

        Keep it as secret as the data until the run is complete: it holds a fingerprint of the data, and the seeds of
        sampling and noise, with which the noise could be subtracted. The state of a complete run holds neither.
        """
        return self._whole_state(self._shards.collect)

    def _whole_state(self, of_parameter: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        """Return the `state_dict`, with tensors that belong to parameters as ``of_parameter`` returns them."""
        self._guard.refuse_pending("the state is taken")
        auto = self._step_size.state_dict() if isinstance(self._step_size, AutoStepSize) else None
        return {
            **self._identity(),
            "execution": self._execution() if self._engine.draws else None,
            "seeded": self.seeded,
            "threshold_state": self._threshold_state,
            "history": [asdict(record) for record in self._records],
            "departure": self._departures.so_far(applied=self._guard.applied),
            "momentum": self._departures.momentum,
            "auto_step_size": None if auto is None else self._by_parameter(auto, of_parameter),
            "secrets": None if self.finished else self._secrets(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of this run, or of a run with the same arguments and the same data."""
        self._require_same_run(state)
        self._logical = None
        self.loader.abandon()
        self._guard.clear()
        self.updated = False
        self._records[:] = map(record_of, state["history"])  # in place, because `history` is a view of the list
        self._warned_lost = any(record.lost for record in self._records)
        self._threshold_state = state["threshold_state"]
        self._engine.draws |= state["execution"] is not None
        self.seeded |= state.get("seeded", False)  # older checkpoints do not say
        self._departures.begin(state["departure"])
        # Older checkpoints hold none: there every momentum but 0 was a departure.
        self._departures.momentum = state.get("momentum", 0.0 if self._records else None)
        if isinstance(self._step_size, AutoStepSize):
            self._step_size.load_state_dict(self._by_parameter(state["auto_step_size"], self._shards.cut))
        secrets = state["secrets"]
        if secrets is None:
            return
        self.loader.reseed(checkpoint.seed_of(secrets["sampling"]))
        if self._repeats_steps and secrets["noise"].get("kind") == self._engine.device.type:
            self._noise.load_state_dict(secrets["noise"])
        else:
            # Another kind of device rounds differently, so the steps would not repeat those of the saved run; and
            # noise that is added to two different sums can be subtracted. So draw fresh noise, whatever the seed.
            self._noise = NoiseSource(seed_sequence(None, self._ranks))
        if secrets["random"] is not None:
            RandomState.from_state_dict(secrets["random"]).restore()

    def save(self, path: str | os.PathLike[str], *, sharded: bool = False, **others: Any) -> None:
        """Write a checkpoint of the run, its model, its optimizers, and other objects with a ``state_dict``, by name.

        The file is replaced atomically, and only its owner can read it. It holds the secrets of `state_dict`. Of
        several ranks, rank 0 writes it, and any number of ranks can resume from it. Call it on all of them.

        Args:
            path: The file.
            sharded: Whether ``path`` is a folder, to which each rank writes its part of a model of `fully_shard`.
            others: Other objects to save.
        """
        if sharded and not self._shards.hold_parts:
            remedy = "leave it out: one file holds everything"
            raise check.refuse("sharded", sharded, "False unless the model is one of fully_shard", remedy)
        content = {
            "training": self._whole_state(self._shards.part if sharded else self._shards.collect),
            "model": self._shards.model_state(self._engine.model, whole=not sharded),
            "optimizers": checkpoint.optimizer_states(
                self._optimizers,
                lambda optimizer: self._shards.optimizer_state(optimizer, whole=not sharded),
                is_read=self._ranks.rank == 0,
            ),
            "others": {name: other.state_dict() for name, other in self._foreign(others).items()},
        }
        if sharded:
            from qclip.training import sharded_checkpoint

            sharded_checkpoint.write(path, content, self._ranks)
        elif self._ranks.rank == 0:
            checkpoint.write(path, content)

    def load(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Continue from a checkpoint of `save`, a file or a folder, with the same other objects: bit for bit on a CPU.

        A file that is damaged, of a newer version, of another run or of other data is refused before anything changes.
        """
        content = self._read(path)
        foreign = self._foreign(others)
        if set(content["others"]) != set(foreign):
            remedy = "pass the objects that were saved, under the same names"
            raise check.refuse("others", sorted(foreign), f"{sorted(content['others'])}, as in the file", remedy)
        self._require_same_run(content["training"])
        checkpoint.require_same_tensors(self._engine.model, content["model"])
        checkpoint.require_same_optimizers(self._optimizers, content["optimizers"])
        self._shards.load_model_state(self._engine.model, content["model"])
        for optimizer, saved in zip(self._optimizers, content["optimizers"], strict=True):
            self._shards.load_optimizer_state(optimizer, saved["state"])
        for name, other in foreign.items():
            other.load_state_dict(content["others"][name])
        self.load_state_dict(content["training"])  # last, because it restores the global generators

    def _read(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        device = self._engine.device
        if not os.path.isdir(path):
            return checkpoint.read(path, device)
        from qclip.training import sharded_checkpoint

        return sharded_checkpoint.read(path, device, self._ranks, self._shards.empty)

    def _foreign(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objects that the run does not save itself."""
        own = (self, self._engine.model, *self._optimizers)
        return {name: other for name, other in others.items() if not any(other is owned for owned in own)}

    def _by_parameter(self, state: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        """Return a state with its lists, which hold one tensor for each parameter, changed."""
        names = list(self._engine.parameters)
        return {
            key: [change(name, x) for name, x in zip(names, value, strict=True)] if isinstance(value, list) else value
            for key, value in state.items()
        }

    def _secrets(self) -> dict[str, Any]:
        seed = self.loader.sampler.seed
        is_between_steps = self._logical is None and self.loader.tickets.front is None
        # A run that is stopped inside a logical batch is resumed before that batch was fetched.
        random_state = RandomState.now() if is_between_steps else self.loader.random_state
        return {
            "sampling": checkpoint.seed_state(seed),
            "data": self._data.under(seed),
            "noise": {
                "kind": self._engine.device.type if self._repeats_steps else "unrepeatable",
                **self._noise.state_dict(),
            },
            "random": None if random_state is None else random_state.state_dict(),
        }

    @property
    def _repeats_steps(self) -> bool:
        """Whether a resumed run repeats the sums of the steps since the checkpoint.

        Not if the model draws random numbers on several ranks: each rank draws its own, and a checkpoint has those of
        one rank.
        """
        return not (self._engine.draws and self._ranks.size > 1)

    def _facts(self, seed: int | None) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name."""
        tensors = self._shards.replicated(self._engine.model)
        return {
            "torch": torch.__version__,
            "seed": seed,
            "dataset": (self.loader.num_examples, self._data.under(self.loader.sampler.seed)),
            **self._identity(),
            **self._execution(),
            **{f"checksum of {name!r}": value for name, value in checksums(tensors).items()},
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "plan": asdict(self._plan),
            "threshold": describe(self.threshold),
            "groups": dict(self._engine.groups.members),
            "rows_per_example": self._evaluation.rows_per_example,
            "rescale_to_unit_norm": self._rule.rescale_to_unit_norm,
            "schedules": self._schedules(),
        }

    def _schedules(self) -> dict[str, list[Any]]:
        """Return values of every schedule to compare runs by: the noise of one run must not serve another."""
        step_size = "auto" if isinstance(self._step_size, AutoStepSize) else self._step_size
        sampled = checkpoint.sampled({"step_size": step_size} | vars(self.threshold), self._plan.num_steps)
        return sampled if step_size is None or callable(step_size) else sampled | {"step_size": [step_size]}

    def _execution(self) -> dict[str, Any]:
        """Return the settings that decide which random numbers an example gets in the forward pass."""
        return {"physical_batch_size": self._physical_batch_size, "compile": self._is_compiled}

    def _require_same_run(self, state: Mapping[str, Any]) -> None:
        checkpoint.require_same_run(state, self._identity(), self._execution(), len(self._records))
        secrets = state["secrets"]
        if secrets is not None:
            self._data.require_same(checkpoint.seed_of(secrets["sampling"]), secrets["data"])

    def _clip(self, batch: tuple[Any, ...]) -> tuple[Ticket, ClippedGradients]:
        whole = batch[0] if len(batch) == 1 else batch
        self._shards.gather()
        ticket, logical = self._redeem(whole)
        return ticket, self._clipper.clip_batch(whole, ticket, logical.clip_norms)

    def _clip_outputs(self, outputs: Any, targets: Any) -> tuple[Ticket, ClippedGradients]:
        self._clipper.require_criterion()
        ticket, logical = self._redeem((outputs, targets))
        return ticket, self._clipper.clip_outputs(outputs, targets, ticket, logical.clip_norms)

    def _redeem(self, batch: Any) -> tuple[Ticket, LogicalStep]:
        """Return the ticket of a batch, and the logical step that the batch continues or begins."""
        self.updated = False
        step = len(self._records)
        self._plan.require_budget(step)
        self._guard.refuse_pending("the next batch")
        ticket = self.loader.tickets.redeem(batch)
        self._rate_watch.see(ticket.position)
        if self._logical is None or ticket.position == 0:
            self._logical = LogicalStep(ask(self._state, self._rule, self._dataset_norms))
        position = self._logical.num_batches
        if (ticket.step, ticket.position) != (step, position):
            raise Refusal(
                f"batch is physical batch {ticket.position} of step {ticket.step}, but physical batch {position} of "
                f"step {step} is due: call training.loss(...).backward() for every batch before the next one"
            )
        return ticket, self._logical

    @property
    def _state(self) -> StepState:
        return StepState(len(self._records), self._threshold_state)

    def _dataset_norms(self) -> np.ndarray:
        batch_size = self._plan.batch_size
        return self._clipper.dataset_norms(self.loader, min(batch_size, self._physical_batch_size or batch_size))

    def _take(self, ticket: Ticket, gradients: ClippedGradients) -> None:
        """Add a physical batch to the sums; after the last one, release them."""
        logical = self._logical
        assert logical is not None
        self._departures.begin(self._departures.so_far(applied=self._guard.applied))  # before `clear` forgets it
        self._guard.clear()
        raw = logical.add(gradients, ticket.num_examples, last=ticket.last)
        if ticket.last:
            total = raw.reduced(self._add_up)
            if total.hopeless:
                self._refuse_hopeless()
            self._apply(release(self._state, total, logical.query, self._rule, self._noise))
            self._logical = None
            self.updated = True

    def _add_up(self, raw: RawSums) -> RawSums:
        """Return the sums over all ranks."""
        step, released = len(self._records), self._records[-1:]
        return self._ranks.add_up(raw, step, released, only_slack=self._shards.sums_are_parts)

    def _apply(self, released: StepRelease) -> None:
        """Record a release, and write its gradient for the optimizers."""
        step = len(self._records)
        if self._step_size is not None:
            _set_step_size(self._optimizers, self._next_step_size(step, released))
        rate = float(self._optimizers[0].param_groups[0]["lr"])
        self._departures.expect(step, rate)
        record = StepRecord(
            step=step,
            tau=released.clip_norms,
            noisy_unclipped=released.noisy_unclipped,
            step_size=rate / released.scale,
            noise_power=released.noise_power,
            clipped_length=released.clipped_length,
            clipped=tuple(each.clipped for each in released.counted),
            clipped_noise=tuple(each.noise for each in released.counted),
            clipped_reach=tuple(each.reach for each in released.counted),
        )
        lost = lost_groups([*self._records[1 - WINDOW :], record], self.threshold, self.groups)
        # Charged before the gradient is visible: an interruption between the lines costs budget, not privacy.
        self._records.append(replace(record, lost=lost))
        self._threshold_state = released.state.threshold
        gradients = released.noisy_gradient
        self._guard.write({name: self._shards.part(name, gradient) for name, gradient in gradients.items()})

    def _next_step_size(self, step: int, released: StepRelease) -> float:
        """Return the learning rate that was set for this step, or that the run finds for it."""
        assert self._step_size is not None
        if not isinstance(self._step_size, AutoStepSize):
            return at(self._step_size, step)
        powers = zip(released.noise_power, released.clip_norms, strict=True)
        noise_power = sum(power * (tau / released.scale) ** 2 for power, tau in powers)
        parameters = self._resident
        gradient = [released.noisy_gradient[name] for name in parameters]
        rate = self._step_size.next_rate(
            step,
            gradient,
            list(parameters.values()),
            noise_power,
            num_coordinates=sum(self._rule.dims),
            add_up=self._ranks.add if self._shards.sums_are_parts else lambda values: values,
        )
        return self._ranks.first(rate)  # with other numbers of threads, ranks round inner products differently

    @property
    def _resident(self) -> dict[str, Tensor]:
        """The parameters in the shapes of the released gradients."""
        return self._shards.resident(self._engine.parameters)

    def _warn(self, stacklevel: int) -> None:
        """Warn once per run and cause, after the step: a warning that is turned into an error loses no step."""
        if self._step_size is None:
            self._rate_watch.warn(stacklevel + 1)
        if self._records and self._records[-1].lost and not self._warned_lost:
            self._warned_lost = True
            warnings.warn(self.lost_threshold, LostThreshold, stacklevel=stacklevel)

    def _refuse_hopeless(self) -> None:
        """Refuse a step without a finite gradient if the model is at fault: its release would be noise alone."""
        if self._ranks.any(not all(bool(p.isfinite().all()) for p in self._resident.values())):
            raise Refusal(
                "the gradients are not finite for any example, because the parameters are not finite: lower the "
                "learning rate"
            )
        if not self._records:
            raise Refusal(
                "the gradients are not finite for any example at the first step: look for NaN in the inputs, the loss "
                "or the initial weights"
            )
        # An unlucky draw of bad examples is not refused: they count as clipped, and the release does not reveal them.

    def _slots_of_next_batch(self) -> int | None:
        """Return the number of slots of the user's next forward pass; None if the pass is not part of the training."""
        ticket = self.loader.tickets.front
        if ticket is not None:
            self._shards.gather()
        return None if ticket is None else ticket.num_slots

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Drop the logical batch on any error inside: its partial sums must be neither released nor added to."""
        try:
            with self._engine.unwatched():
                yield
        except BaseException as error:
            self._logical = None
            self.loader.abandon()
            cause = self._ranks.as_lost(error)
            if not isinstance(cause, LostRank):
                self._shards.tell_failure(len(self._records))
            self._shards.recover()
            if cause is not error:
                raise cause from error
            raise


def _mean_loss(gradients: ClippedGradients, ticket: Ticket) -> Tensor:
    return torch.where(gradients.mask, gradients.losses, 0).sum() / ticket.num_slots


def _set_step_size(optimizers: Sequence[Optimizer], value: float) -> None:
    value = check.positive("step_size", value, "a schedule returns the learning rate of each step")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

"""The prover: reruns a captured forward pass in all the ways that a proof needs, and returns a plan."""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.capture import checks
from qclip.engine.capture.capture import Capture, Observe
from qclip.engine.capture.checks import Evaluate
from qclip.engine.capture.repeat import OtherCalls, Repeat, Script
from qclip.engine.gradients.forms import Dense
from qclip.engine.gradients.parts import Part, Parts
from qclip.engine.gradients.plan import OneByOne, Plan
from qclip.engine.proof.few import NUM_PROVEN, WORTH_IT, norms_by_parameter, require_separate_halves, same_calls
from qclip.engine.proof.perturbation import movable, perturbed
from qclip.engine.proof.precision import at_least
from qclip.engine.proof.proof import (
    ROUGH_TOLERANCE,
    TOLERANCE,
    NotBroadcast,
    NotTogether,
    Subject,
    prove,
    require_owners,
    require_separation_in_float32,
)
from qclip.engine.proof.separation import Mixing, replacement, require_rows_in_bags
from qclip.engine.proof.totals import is_rough, plain_gradients, require_totals
from qclip.engine.proof.traces import Repetition, Trial
from qclip.engine.randomness import NoDropout, RandomState, drawn_call_by_call
from qclip.engine.sharding import Sharding

CALLS_FOR_REFUSAL: Final = (
    RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError, KeyError,
)  # fmt: skip
"""What torch and models raise when they are run in an unsupported way."""
FEW: Final = 8
"""The number of examples that are proven in float32."""


class Provable(Protocol):
    """The engine, as far as a proof needs it."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    data_independent_buffers: tuple[str, ...]
    sharding: Sharding

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        ...

    def in_precision(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Compute in this precision inside the context."""
        ...

    def record(
        self,
        evaluate: Evaluate,
        batch: Any,
        batch_size: int,
        /,
        *,
        keep_values: bool = ...,
        observe: Observe | None = ...,
        proving: bool = ...,
    ) -> Any:
        """Run the evaluation and capture every use of a parameter."""
        ...

    def repeat(
        self, evaluate: Evaluate, batch: Any, script: Script, observe: Observe | None, /
    ) -> tuple[Repeat, Tensor]:
        """Run the evaluation again, where it makes the same calls as before."""
        ...

    def one_by_one(
        self, run: Any, evaluate: Evaluate, batch: Any, is_counted: Tensor, how: OneByOne, /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the losses and gradients of a batch, one example at a time."""
        ...

    def collect(self, run: Any, plan: Plan, is_counted: Tensor, evaluate: Evaluate, batch: Any, /) -> Parts:
        """Return the contributions of the sites to every parameter."""
        ...


class Prover:
    """Proves one forward pass.

    Args:
        engine: The engine.
        run: The captured forward pass.
        evaluate: Runs the model on a batch and returns one loss per example.
        batch: The batch of the run.
    """

    def __init__(self, engine: Provable, run: Any, evaluate: Evaluate, batch: Any) -> None:
        self._engine, self._run, self._evaluate, self._batch = engine, run, evaluate, batch
        self.draws = False
        """Whether the evaluation drew random numbers from any generator."""
        self._fingerprints: set[int] = set()
        self._unseen: list[str] = []
        self._at_rest = False

    def prove(self, *, on_few: bool = False) -> Plan:
        """Return a plan for the run.

        Args:
            on_few: Whether a proof on a few examples may do, because these calls were proven before, with other sizes.

        Buffers and frozen parameters are perturbed like the parameters, so that the plan holds for other values of
        them. Where that is impossible, or changes what the model does, the plan holds for their present values.

        Where gradients cannot be told apart, examples are run one at a time. The same is done where random numbers seem
        to mix examples: which of them an example draws may depend on where the rows of others go.

        Raises:
            Refusal: The run cannot be proven.
        """
        plan = self._on_few() if on_few else None
        if plan is not None:
            return plan
        try:
            return self._together()
        except NotTogether as refusal:
            return self._one_by_one(refusal)
        except Mixing as refusal:
            require_rows_in_bags(self._run.capture.sites, self._batch)
            if not (self.draws and self._run.capture.routes):
                raise
            return self._one_by_one(refusal)

    def prove_at_rest(self, plan: Plan) -> Plan:
        """Return a plan that also holds for gradients that are zero at perturbed parameters, and not at these.

        Args:
            plan: The plan that is proven at perturbed parameters.

        Raises:
            Refusal: The run cannot be proven at its own parameters.
        """
        self._at_rest = True
        here = self._plan([])
        if here.whole != plan.whole or len(here.sites) != len(plan.sites):
            return plan
        shown = plan.silent - here.silent
        sites = tuple(here.sites[k] if k in shown else how for k, how in enumerate(plan.sites))
        return replace(plan, sites=sites, silent=plan.silent - shown)

    def _on_few(self) -> Plan | None:
        """Return a plan that is proven on a few examples, if all of them make the same calls and agree with it.

        On all of them the gradients must add up to autograd's, and must not change where others are replaced. Whatever
        is in doubt is left to a proof on all examples.
        """
        engine, run = self._engine, self._run
        if run.batch_size < WORTH_IT or run.capture.routes or not engine.sharding.runs_alone:
            return None
        if engine.data_independent_buffers:
            return None  # they move in every run
        few_batch = batches.select(self._batch, slice(NUM_PROVEN), run.batch_size)
        try:
            with run.random_state.replayed():
                few = engine.record(self._evaluate, few_batch, NUM_PROVEN, proving=True)
            if not same_calls(few.capture, run.capture, NUM_PROVEN, run.batch_size):
                return None
            prover = Prover(engine, few, self._evaluate, few_batch)
            plan = prover._together()
            self.draws |= prover.draws
            if not plan.proven or plan.silent or plan.whole:
                return None
            with perturbed(engine.parameters.values()):
                self._require_agreement(plan)
        except (Refusal, NotBroadcast, *CALLS_FOR_REFUSAL):
            return None
        return plan

    def _require_agreement(self, plan: Plan) -> None:
        """Refuse a plan that was proven on a few examples if the whole batch contradicts it."""
        engine, run = self._engine, self._run
        everyone = torch.ones(run.batch_size, dtype=torch.bool, device=run.losses.device)

        def observe(batch: Any) -> tuple[Tensor, Tensor]:
            with run.random_state.replayed():
                again = engine.record(self._evaluate, batch, run.batch_size)
            expected = plain_gradients(again.losses, engine.parameters) if batch is self._batch else None
            parts = engine.collect(again, plan, everyone, self._evaluate, batch)
            if expected is not None:
                require_totals(parts, expected, again.capture.sites, engine.parameters, run.batch_size)
            return again.losses.detach(), norms_by_parameter(parts)

        rough = any(map(is_rough, run.capture.sites))
        require_separate_halves(observe, self._batch, run.batch_size, ROUGH_TOLERANCE if rough else TOLERANCE)

    def _together(self) -> Plan:
        constants = self._run.state.constants
        moving = [x for x in constants.values() if movable(x)]
        try:
            plan = self._plan(moving)
        except Refusal as refusal:
            if not moving:
                raise
            plan = self._plan([])
            if isinstance(refusal, Mixing):
                names = ", ".join(repr(name) for name, x in constants.items() if movable(x))
                raise Mixing(
                    f"with other values of buffers and frozen parameters ({names}), which may change later, {refusal}. "
                    "A term that is switched on later may be a Python number: it is proven once it is on"
                ) from refusal
            return plan
        if moving and (not plan.proven or plan.silent) and not self._run.capture.routes:
            at_rest = self._plan([])  # the perturbed values may not make sense to the model
            if at_rest.proven and (not plan.proven or at_rest.silent < plan.silent):
                return at_rest
        return replace(plan, moved=True)

    def _subject(self, constants: list[Tensor]) -> Subject:
        engine = self._engine

        def require_totals(plan: Plan, trial: Trial | None) -> None:
            self._require_totals(plan, subject, trial)

        subject = Subject(
            self._batch,
            self._run.batch_size,
            engine.device,
            self._rerun,
            perturbed=lambda: nullcontext() if self._at_rest else perturbed(engine.parameters.values(), constants),
            evaluation=lambda: in_evaluation(engine.model),
            enlarged=lambda factors: enlarged(engine.model, factors),
            in_float64=self._in_float64,
            first_run=self._first_run,
            require_totals=require_totals,
        )
        return subject

    def _one_by_one(self, refusal: Refusal) -> Plan:
        """Return a plan to run examples one at a time, if that gives the losses and the gradients of the batch.

        That no example depends on others needs no proof then, only that the batch's gradients are what users mean.
        """
        engine = self._engine
        if not engine.sharding.runs_alone:
            raise refusal
        subject = self._subject([])
        with subject.perturbed():
            draws = subject.first_run(subject.batch).random
        problem = ""
        ways = [(False, False), (True, False)]  # in copies, with draws of its own
        ways = [(True, False), (False, True), (True, True)] if draws else ways
        for how in itertools.starmap(OneByOne, ways):
            reason = refusal.reason if isinstance(refusal, NotTogether) else str(refusal)
            names = dict.fromkeys(engine.parameters, reason)
            try:
                with NoDropout() if how.own_draws else nullcontext():
                    shown = self._require_same_alone(how, subject)
                doubt = "" if shown else "no two examples are finite"
                return Plan((), frozenset(names), names, doubt, moved=True, one_by_one=how)
            except (Refusal, *CALLS_FOR_REFUSAL) as error:
                problem = first_line(error)
        kind = Mixing if isinstance(refusal, Mixing) else Refusal
        raise kind(f"{refusal}. Running the model one example at a time failed too: {problem}") from refusal

    def _require_same_alone(self, how: OneByOne, subject: Subject) -> bool:
        """Refuse to run examples one at a time if their losses, or the sum of their gradients, are not the batch's.

        Returns:
            Whether the batch could show it: two examples are finite.
        """
        try:
            return self._compare_alone(how, subject)
        except Refusal:  # perhaps rounding: batches of other sizes run on other kernels
            with self._in_float64(subject) as precise:
                return self._compare_alone(how, precise)

    def _compare_alone(self, how: OneByOne, subject: Subject) -> bool:
        engine, run = self._engine, self._run
        everyone = torch.ones(run.batch_size, dtype=torch.bool, device=run.losses.device)
        repeated = replace(how, own_draws=False)

        def evaluate(batch: Any) -> Tensor:
            with drawn_call_by_call() if how.own_draws else nullcontext():
                return self._evaluate(batch)

        def alone(batch: Any) -> tuple[Any, Tensor, dict[str, Tensor]]:
            with run.random_state.replayed():
                again = engine.record(evaluate, batch, run.batch_size)
            return again, *engine.one_by_one(again, evaluate, batch, everyone, repeated)

        with subject.perturbed():
            again, losses, grads = alone(subject.batch)
            is_finite = losses.isfinite() & again.losses.isfinite()
            for grad in grads.values():
                is_finite &= grad.flatten(1).isfinite().all(1)
            if not bool(is_finite.any()):
                return False
            if not bool(is_finite.all()):  # it says nothing of the others
                again, losses, grads = alone(batches.select(subject.batch, replacement(is_finite), run.batch_size))
            rough = any(map(is_rough, again.capture.sites)) or losses.dtype == torch.bfloat16
            apart = (losses - again.losses.detach()).abs()
            tolerance = ROUGH_TOLERANCE if rough else TOLERANCE
            if bool((apart > tolerance * (losses.abs() + again.losses.detach().abs()) + 1e-12).any()):
                raise Mixing("an example by itself has another loss than in the batch")
            expected = plain_gradients(again.losses, engine.parameters)
            parts = {name: [Part(Dense(grad))] for name, grad in grads.items()}
            require_totals(parts, expected, again.capture.sites, engine.parameters, run.batch_size)
            return run.batch_size == 1 or int(is_finite.sum()) > 1

    def _plan(self, constants: list[Tensor]) -> Plan:
        run, engine = self._run, self._engine
        subject = self._subject(constants)
        self._unseen, reached = checks.unseen_parameters(run.losses, run.capture.sites, engine.parameters)
        self._fingerprints = {run.capture.fingerprint}
        plan = prove(run.capture, self._unseen, reached, subject)
        if run.capture.routes or len(self._fingerprints) > 1:
            require_owners(Repetition(run.capture, run.losses, random=False), plan)
        if run.batch_size > 1 and any(map(is_rough, run.capture.sites)):
            self._require_separation_in_float32(plan, subject)
        return plan

    def _require_totals(self, plan: Plan, subject: Subject, trial: Trial | None) -> None:
        """Refuse a plan by which the gradients of a trial, or of another run, do not add up to autograd's.

        Where an example's gradient is a sum that nearly cancels, rounding may exceed the sum. So a difference is
        computed again in float64, but not where the loss depends on parameters outside of the captured functions:
        float64 needs copies of the parameters, which such a loss would not use.
        """
        try:
            self._add_up(plan, subject.batch, trial)
        except Refusal as refusal:
            if self._unseen:
                raise
            try:
                with self._in_float64(subject) as precise:
                    self._add_up(plan, precise.batch, None)
            except (Refusal, torch.OutOfMemoryError, *CALLS_FOR_REFUSAL) as error:
                raise refusal from error

    def _add_up(self, plan: Plan, batch: Any, trial: Trial | None) -> None:
        engine, run = self._engine, self._run
        if trial is None:
            with run.random_state.replayed():
                again = engine.record(self._evaluate, batch, run.batch_size)
            if [site.parameters for site in again.capture.sites] != [site.parameters for site in run.capture.sites]:
                raise Refusal("the model uses other parameters there")
        else:
            again = trial
        expected = plain_gradients(again.losses, engine.parameters)
        is_counted = torch.ones(run.batch_size, dtype=torch.bool, device=again.losses.device)
        parts = engine.collect(again, replace(plan, silent=frozenset()), is_counted, self._evaluate, batch)
        require_totals(parts, expected, again.capture.sites, engine.parameters, run.batch_size)

    @contextmanager
    def _in_float64(self, subject: Subject) -> Iterator[Subject]:
        with self._engine.in_precision(torch.float64):
            yield replace(subject, batch=_cast(subject.batch, torch.float64), script=None)

    def _require_separation_in_float32(self, plan: Plan, subject: Subject) -> None:
        """Prove what 16 bits cannot show, unless the model runs in 16 bits only, or float32 does not fit in memory."""
        few = min(subject.batch_size, FEW)
        batch = _cast(batches.select(subject.batch, slice(few), subject.batch_size), torch.float32)
        try:
            with self._engine.in_precision(torch.float32):
                require_separation_in_float32(replace(subject, batch=batch, batch_size=few), plan)
        except Mixing:
            raise
        except (Refusal, torch.OutOfMemoryError):
            return

    def _rerun(
        self,
        batch: Any,
        batch_size: int,
        *,
        script: Script | None = None,
        observe: Observe | None = None,
    ) -> Repetition:
        if script is not None:
            try:
                with self._replayed() as draws:
                    repeat, losses = self._engine.repeat(self._evaluate, batch, script, observe)
                return self._repetition(repeat, losses, batch_size, draws)
            except OtherCalls:
                pass
        with self._replayed() as draws:
            again = self._engine.record(self._evaluate, batch, batch_size, observe=observe, proving=True)
        return self._repetition(again.capture, again.losses, batch_size, draws)

    def _first_run(self, batch: Any) -> Trial:
        batch_size = self._run.batch_size
        with self._replayed() as draws, _inputs_that_can_grow(self._engine.model, batch_size) as growing:
            again = self._engine.record(self._evaluate, batch, batch_size, keep_values=True, proving=True)
        self._fingerprints.add(again.capture.fingerprint)
        repetition = self._repetition(again.capture, again.losses, batch_size, draws)
        script = None if again.capture.routes else Script.of(again.capture, again.state)
        return Trial(again.capture, again.losses, repetition.random, script, can_grow=bool(growing))

    @contextmanager
    def _replayed(self) -> Iterator[list[bool]]:
        """Replay the random numbers of the run; fill the list with whether any were drawn. Refuse what fails inside."""
        drawn: list[bool] = []
        with self._run.random_state.replayed(), self._restored():
            start = RandomState.now(self._engine.device)
            try:
                with drawn_call_by_call():
                    yield drawn
            except (Refusal, OtherCalls, torch.OutOfMemoryError):
                raise
            except CALLS_FOR_REFUSAL as error:
                raise Refusal(
                    f"the model could not be run again with some examples replaced or left out: {first_line(error)}. "
                    "Every input with one row per example must make sense in another order, and in a smaller batch"
                ) from error
            drawn.append(not (start.unmoved() and start.python_unmoved()))

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Restore buffers that may move in a forward pass on exit, so that every run starts from the same ones."""
        engine = self._engine
        buffers = [(x, x.detach().clone()) for _, x in engine.model.named_buffers() if engine.data_independent_buffers]
        try:
            yield
        finally:
            for x, before in buffers:
                x.data.copy_(before)

    def _repetition(self, capture: Capture | Repeat, losses: Any, batch_size: int, drawn: list[bool]) -> Repetition:
        checks.require_losses(losses, batch_size)
        (random,) = drawn
        self.draws |= random
        return Repetition(capture, losses, random)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: at_least(dtype, x), batch)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0]


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and restore each module's mode on exit."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def enlarged(model: nn.Module, factors: Tensor) -> Iterator[None]:
    """Multiply the model's floating-point inputs by factors [B].

    Elements that are whole numbers stay: they may be indices, and an index out of range is fatal on a GPU.
    """
    batch_size = len(factors)

    def larger(x: Any) -> Any:
        if not _can_grow(x, batch_size):
            return x
        return torch.where(x == x.round(), x, x * factors.to(x).view(-1, *[1] * (x.dim() - 1)))

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        with torch._C.DisableTorchFunction():  # these are no calls of the model
            return pytree.tree_map(larger, (args, kwargs))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _inputs_that_can_grow(model: nn.Module, batch_size: int) -> Iterator[list[Tensor]]:
    """Yield a list that is empty if no input of the model can be `enlarged`."""
    found: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunction():
            found.extend(x for x in batches.tensor_leaves((args, kwargs)) if _can_grow(x, batch_size))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def _can_grow(x: Any, batch_size: int) -> bool:
    return batches.is_example_wise(x, batch_size) and x.is_floating_point()

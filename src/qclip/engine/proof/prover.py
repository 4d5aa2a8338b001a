"""The prover: runs a model again in all the ways that a proof asks for, and turns what it says into a plan."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.capture import checks
from qclip.engine.capture.checks import Evaluate
from qclip.engine.gradients.parts import Parts
from qclip.engine.gradients.plan import Plan
from qclip.engine.proof.perturbation import movable, perturbed
from qclip.engine.proof.precision import in_digits_of
from qclip.engine.proof.proof import Mixing, Modes, Repetition, prove, require_owners, require_separation_in_float32
from qclip.engine.proof.totals import is_rough, plain_gradients, require_totals
from qclip.engine.randomness import RandomState

CALLS_FOR_REFUSAL: Final = (
    RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError, KeyError,
)  # fmt: skip
"""What torch and models raise when they are run in a way they cannot be."""
FEW: Final = 8
"""How many examples are looked at in float32."""


class Provable(Protocol):
    """The engine, as a proof sees it."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        ...

    def in_precision(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Compute in these digits for a while."""
        ...

    def record(
        self,
        evaluate: Evaluate,
        batch: Any,
        batch_size: int,
        *,
        keep_values: bool = ...,
        observe: Callable[[int, Tensor], None] | None = ...,
        proving: bool = ...,
    ) -> Any:
        """Run the evaluation with every use of a parameter captured."""
        ...

    def collect(self, run: Any, plan: Plan, is_counted: Tensor, evaluate: Evaluate, batch: Any) -> Parts:
        """What the sites contribute to every parameter."""
        ...


class Prover:
    """Proves one forward pass: ``run``, of ``evaluate`` on ``batch``."""

    def __init__(self, engine: Provable, run: Any, evaluate: Evaluate, batch: Any) -> None:
        self._engine, self._run, self._evaluate, self._batch = engine, run, evaluate, batch
        self.draws = False
        """Whether the evaluation drew random numbers, of any generator."""

    def prove(self) -> Plan:
        """A plan for the run, or a refusal.

        Buffers and frozen parameters are moved with the parameters, so that the plan holds for other values of them.
        Where that cannot be done, or changes what the model does, it holds for the values they have.
        """
        constants = self._run.state.constants
        moving = [x for x in constants.values() if movable(x)]
        try:
            plan = self._proven(moving)
        except Refusal as refusal:
            if not moving:
                raise
            plan = self._proven([])
            if isinstance(refusal, Mixing):
                names = ", ".join(repr(name) for name, x in constants.items() if movable(x))
                raise Mixing(
                    f"with other values of buffers and frozen parameters ({names}), which may change later, {refusal}. "
                    "A term that is switched on later may be a Python number: it is proven when it is"
                ) from refusal
            return plan
        if moving and not plan.proven and not self._run.capture.routes:  # these values may not make sense to the model
            at_rest = self._proven([])
            if at_rest.proven:
                return at_rest
        return replace(plan, moved=True)

    def _proven(self, constants: list[Tensor]) -> Plan:
        run, engine = self._run, self._engine
        modes = Modes(
            lambda: perturbed(engine.parameters.values(), constants),
            lambda: in_evaluation(engine.model),
            lambda factors: enlarged(engine.model, factors),
        )
        unseen, reached = checks.unseen_parameters(run.losses, run.capture.sites, engine.parameters)
        plan = prove(run.capture, unseen, reached, self._batch, run.batch_size, self._rerun, modes)
        fingerprint = self._require_totals(plan, modes, again=not unseen)
        if run.capture.routes or fingerprint != run.capture.fingerprint:
            require_owners(Repetition(run.capture, run.losses, random=False), plan)
        if run.batch_size > 1 and any(map(is_rough, run.capture.sites)):
            self._require_separation_in_float32(plan, modes)
        return plan

    def _require_totals(self, plan: Plan, modes: Modes, *, again: bool) -> Any:
        """Refuse a plan by which gradients do not add up to autograd's; what kind of forward pass it was.

        Where an example's gradient is a sum that nearly cancels, rounding alone may be larger than what is left of it:
        what seems wrong is computed ``again`` in float64. Not where the loss knows of parameters by a way that is not
        seen: float64 is that of copies, of which it does not know.
        """
        try:
            return self._add_up(plan, modes, self._batch)
        except Refusal as refusal:
            if not again:
                raise
            batch = self._cast(self._batch, torch.float64)
            try:
                with self._engine.in_precision(torch.float64):
                    return self._add_up(plan, modes, batch)
            except (Refusal, torch.OutOfMemoryError, *CALLS_FOR_REFUSAL) as error:
                raise refusal from error

    def _add_up(self, plan: Plan, modes: Modes, batch: Any) -> Any:
        engine, run = self._engine, self._run
        with modes.perturbed():
            with run.random_state.replayed():
                again = engine.record(self._evaluate, batch, run.batch_size)
            if [site.parameters for site in again.capture.sites] != [site.parameters for site in run.capture.sites]:
                raise Refusal("the model uses other parameters there")
            expected = plain_gradients(again.losses, engine.parameters)
            everyone = torch.ones(run.batch_size, dtype=torch.bool, device=again.losses.device)
            parts = engine.collect(again, plan, everyone, self._evaluate, batch)
            require_totals(parts, expected, again.capture.sites, engine.parameters)
        return again.capture.fingerprint

    @staticmethod
    def _cast(batch: Any, dtype: torch.dtype) -> Any:
        return pytree.tree_map_only(Tensor, lambda x: in_digits_of(dtype, x), batch)

    def _require_separation_in_float32(self, plan: Plan, modes: Modes) -> None:
        """What 16 bits cannot tell; left out where the model runs in these only, or does not fit in others."""
        few = min(self._run.batch_size, FEW)
        part = self._cast(batches.select(self._batch, slice(few), self._run.batch_size), torch.float32)
        try:
            with self._engine.in_precision(torch.float32):
                require_separation_in_float32(self._rerun, part, few, plan, modes)
        except Mixing:
            raise
        except (Refusal, torch.OutOfMemoryError):
            return

    def _rerun(
        self,
        batch: Any,
        count: int,
        *,
        keep_values: bool = False,
        observe: Callable[[int, Tensor], None] | None = None,
    ) -> Repetition:
        with self._run.random_state.replayed():
            start = RandomState.now(self._engine.device)
            try:
                again = self._engine.record(
                    self._evaluate, batch, count, keep_values=keep_values, observe=observe, proving=True
                )
            except (Refusal, torch.OutOfMemoryError):
                raise
            except CALLS_FOR_REFUSAL as error:
                raise Refusal(
                    f"the model could not be run again with some examples replaced or left out: {first_line(error)}. "
                    "Every input with one row per example must make sense in another order, and in a smaller batch"
                ) from error
            checks.require_losses(again.losses, count)
            random = not start.unmoved()
            self.draws |= random or not start.python_unmoved()
            return Repetition(again.capture, again.losses, random)


def first_line(error: Exception) -> str:
    """Of an error's message."""
    return str(error).strip().split("\n")[0]


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then each module as it was."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def enlarged(model: nn.Module, factors: Tensor) -> Iterator[list[bool]]:
    """The model's floating-point inputs multiplied by these factors, one for each example; notes that there are any.

    Whole numbers stay: they may be indices, and a GPU does not survive one that is out of range.
    """
    applied: list[bool] = []

    def larger(x: Any) -> Any:
        if not batches.is_example_wise(x, len(factors)) or not x.is_floating_point():
            return x
        applied.append(True)
        return torch.where(x == x.round(), x, x * factors.to(x).view(-1, *[1] * (x.dim() - 1)))

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return pytree.tree_map(larger, (args, kwargs))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield applied
    finally:
        handle.remove()

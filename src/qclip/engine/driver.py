"""The eager driver: one forward pass, one backward pass to the sites, norms, clip factors, sums."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.capture import checks, faults
from qclip.engine.capture.capture import Capture
from qclip.engine.capture.checks import Evaluate
from qclip.engine.capture.constants import Snapshot
from qclip.engine.capture.forward_hooks import Watch, Watched
from qclip.engine.gradients import clipping, fallback
from qclip.engine.gradients.clipping import sum_dtype
from qclip.engine.gradients.costs import CostModel
from qclip.engine.gradients.forms import Dense
from qclip.engine.gradients.parts import Part, Parts, collect, prepare
from qclip.engine.gradients.plan import Plan, signature
from qclip.engine.groups import ClipNorm, GroupSpec, partition
from qclip.engine.kernels.products import scale_examples
from qclip.engine.proof.precision import in_precision
from qclip.engine.proof.proof import PROOFS, SAME_WAY, NotSpreading
from qclip.engine.proof.prover import CALLS_FOR_REFUSAL, Prover, first_line
from qclip.engine.randomness import RandomState
from qclip.engine.result import ClippedGradients
from qclip.engine.torch_settings import deterministically, tf32_anywhere, uncompiled, warn_if_untested


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on its inputs: a dict is keyword arguments, a tuple or list positional ones, else the one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if type(inputs) in (tuple, list):  # a named tuple is one argument
        return model(*inputs)
    return model(inputs)


Choice = ClipNorm | Callable[[Tensor], ClipNorm]
"""The threshold of each group, or a function that chooses it from norms [examples, K]."""
ValidChoice = tuple[float, ...] | Callable[[Tensor], ClipNorm]
"""The same, with validated clip norms."""
Plans = dict[Any, tuple[Plan, int, Snapshot]]
"""By kind of forward pass: how to deal with it, how often it was used, and the constants it was proven with."""
_OFTEN = 3
"""How often a constant may call for a new proof before that is said."""
_MOST_PLANS = 256


class Engine:
    """Exact clipped gradient sums of one model.

    ``data_independent`` declares buffers (as glob patterns) that may change in a forward pass because nothing in the
    data changes them, such as the power iteration of a spectral norm. A ``criterion`` with buffers of its own is
    watched like the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        criterion: nn.Module | None = None,
        groups: GroupSpec = "flat",
        data_independent: Sequence[str] = (),
        costs: CostModel | None = None,
        plans: Plans | None = None,
    ) -> None:
        warn_if_untested(torch.__version__)
        self.model = checks.unwrapped(model)
        self.criterion = criterion
        self.parameters = checks.trainable(self.model)
        self.groups = partition(self.parameters, groups)
        self.data_independent = tuple(data_independent)
        self.costs = costs or CostModel()
        self._plans: Plans = {} if plans is None else plans
        self._not_spreading: dict[int, frozenset[int]] = {}
        self.proofs = 0
        """How many were made."""
        self.proven: tuple[Evaluate, Any] | None = None
        """What the last proof evaluated, and on which batch: for those who have more to prove then."""
        self.draws = False
        """Whether a proof saw the evaluation draw random numbers."""
        self._warned = False
        self._moves: Counter[str] = Counter()
        self._watch: Watch | None = None
        self._recording = False

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    @torch.enable_grad()
    def clipped(
        self,
        evaluate: Evaluate,
        batch: Any,
        clip_norm: Choice,
        *,
        mask: Tensor | None = None,
        like: int | None = None,
    ) -> ClippedGradients:
        """The clipped sum for a batch, where ``evaluate(batch)`` runs the model and returns one loss per example.

        A function as ``clip_norm`` is given the norms of the examples that count, [examples, K], and chooses then. To
        compare with a compiled step of more examples, norms are taken as it takes them of all that are ``like`` these.
        """
        choice = self._choice(clip_norm)
        count = batches.size(batch, mask)
        if count == 0:
            return self._nothing(choice)
        run = self.record(evaluate, batch, count)
        return self._finish(run, evaluate, batch, choice, mask, like=like)

    def watch(self, batch_size: Callable[[], int | None]) -> Watch:
        """From now on, capture every forward pass of the model that is called with gradients enabled.

        ``batch_size()`` says how many examples the next one holds; None leaves it alone. `finish` turns the last
        captured pass into a clipped sum.
        """

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watched | None:
            count = None if self._recording else batch_size()
            return Watched(self._begin((args, kwargs), count), args, kwargs) if count else None

        self._watch = Watch(self.model, begin)
        return self._watch

    @torch.enable_grad()
    def finish(
        self,
        outputs: Any,
        targets: Any,
        loss: Callable[[Any, Any], Tensor],
        clip_norm: Choice,
        *,
        mask: Tensor | None = None,
    ) -> ClippedGradients:
        """The clipped sum for the watched forward pass that gave ``outputs``; ``loss(outputs, targets)`` is one value
        per example.

        ``outputs`` must be what the model returned, or a part of it: what is computed from it belongs into the loss,
        where it can be proven to treat every example by itself.
        """
        watched = self._watch.last if self._watch is not None else None
        if self._watch is None or watched is None:
            raise Refusal(
                "no forward pass to take gradients from; call the model on the batch, with gradients enabled, before "
                "its loss (the model itself: a compiled one cannot be watched)"
            )
        self._watch.last = None
        watched.require_unchanged_outputs()
        find = watched.finder(outputs)
        if find is None:
            raise Refusal(
                "``outputs`` must be what the model just returned, or a part of it; put what is computed from it into "
                "the loss, such as lambda outputs, targets: criterion(outputs.squeeze(1), targets)"
            )

        def evaluate(batch: Any) -> Tensor:
            (args, kwargs), others = batch
            return loss(find(watched.again(self.model, args, kwargs)), others)

        run = watched.run
        run.state.require_unmoved(self.model, self.criterion, self.data_independent)
        checks.require_unchanged_inputs(run.capture.sites)
        run.losses = loss(outputs, targets)
        batch = ((watched.args, watched.kwargs), targets)
        return self._finish(run, evaluate, batch, self._choice(clip_norm), mask, kind=loss)

    def record(
        self,
        evaluate: Evaluate,
        batch: Any,
        count: int,
        *,
        keep_values: bool = False,
        observe: Callable[[int, Tensor], None] | None = None,
        proving: bool = False,
    ) -> "Run":
        """Run the evaluation with every use of a parameter captured."""
        run = self._begin(batch, count, keep_values=keep_values, observe=observe, proving=proving)
        self._recording = True
        versions = [(x, x._version) for x in batches.tensor_leaves(batch)]
        try:
            with torch.enable_grad(), ExitStack() as stack:
                run.enter(stack)
                run.losses = evaluate(batch)
        finally:
            self._recording = False
        run.state.require_unmoved(self.model, self.criterion, self.data_independent)
        if any(x._version != version for x, version in versions):
            raise Refusal(
                "the model changes its input in place; let it make a new tensor (x = x - 1 instead of x -= 1)"
            )
        checks.require_unchanged_inputs(run.capture.sites)
        return run

    def capture(
        self,
        parameters: Mapping[str, Tensor],
        constants: Sequence[Tensor],
        batch: Any,
        count: int,
        *,
        like: int,
        keep_values: bool = False,
        observe: Callable[[int, Tensor], None] | None = None,
        traced: bool = False,
    ) -> Capture:
        """A capture ready to be entered, for a forward pass that sees these as the model's tensors.

        What was learnt about calls that seem to give rows to examples is that of batches of ``like`` examples.
        """
        shared = [x for x in batches.tensor_leaves(batch) if not batches.is_example_wise(x, count)]
        return Capture(
            parameters,
            [*constants, *shared],
            count,
            not_spreading=self._not_spreading.get(like, frozenset()),
            keep_values=keep_values,
            observe=observe,
            traced=traced,
        )

    @contextmanager
    def in_precision(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in these digits for a while: on copies of all that has fewer, also of parameters."""
        modules = [self.model] if self.criterion is None else [self.model, self.criterion]
        own = self.parameters
        with in_precision(dtype, modules):
            self.parameters = checks.trainable(self.model)
            try:
                yield
            finally:
                self.parameters = own

    def require_same_parameters(self) -> None:
        """Refuse a model whose trainable parameters are not those the engine was made for."""
        current = checks.trainable(self.model)
        if list(current) != list(self.parameters):
            raise Refusal(
                "the set of trainable parameters has changed since the engine was made; make a new one after freezing "
                "or unfreezing"
            )
        replaced = [name for name, p in current.items() if p is not self.parameters[name]]
        if replaced:
            raise Refusal(
                f"parameter {replaced[0]!r} was replaced by another since the engine was made (load_state_dict with "
                "assign=True?); optimizers hold the old one: make a new engine, or copy values in place"
            )

    def _begin(
        self,
        batch: Any,
        count: int,
        *,
        keep_values: bool = False,
        observe: Callable[[int, Tensor], None] | None = None,
        proving: bool = False,
    ) -> "Run":
        """A capture ready to be entered; a proof also compares the values of buffers."""
        checks.require_gradient_mode()
        checks.require_inputs(batch)
        self.require_same_parameters()
        state = checks.State.of(self.model, self.criterion, by_value=proving)
        constants = list(state.constants.values())
        capture = self.capture(
            self.parameters, constants, batch, count, like=count, keep_values=keep_values, observe=observe
        )
        return Run(capture, state, RandomState.now(self.device), count)

    def _finish(
        self,
        run: "Run",
        evaluate: Evaluate,
        batch: Any,
        choice: ValidChoice,
        mask: Tensor | None,
        *,
        kind: Any = None,
        like: int | None = None,
    ) -> ClippedGradients:
        """From the captured forward pass and its losses to the clipped sum."""
        checks.require_losses(run.losses, run.count)
        keep = batches.full_mask(run.count, mask, run.losses.device)
        run, _, parts = self.parts(run, keep, evaluate, batch, kind=kind)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            prepare(parts, self.costs, None if like is None else self.groups.memory_phases(), like=like)
            return self._clip(parts, run.losses, keep, choice)

    @torch.enable_grad()
    def parts(
        self, run: "Run", keep: Tensor, evaluate: Evaluate, batch: Any, *, kind: Any = None
    ) -> "tuple[Run, Plan, Parts]":
        """How every parameter is dealt with, and what the sites contribute to it; the run may have been made anew."""
        with faults.avoided():
            run, plan = self._settled(run, evaluate, batch, lambda run: self._plan(run, evaluate, batch, kind))
            return run, plan, self.collect(run, plan, keep, evaluate, batch)

    @torch.enable_grad()
    def prove(self, evaluate: Evaluate, batch: Any, count: int) -> "tuple[Run, Plan]":
        """A forward pass on this batch, and how it is dealt with, proven on it whatever is known already."""
        with faults.avoided():
            run = self.record(evaluate, batch, count)
            checks.require_losses(run.losses, count)
            return self._settled(run, evaluate, batch, lambda run: self._prove(run, evaluate, batch))

    def _settled(
        self, run: "Run", evaluate: Evaluate, batch: Any, find_plan: "Callable[[Run], Plan]"
    ) -> "tuple[Run, Plan]":
        while True:
            try:
                return run, find_plan(run)
            except NotSpreading as wrong:  # now that this is known, look at the same forward pass again
                known = self._not_spreading.get(run.count, frozenset())
                self._not_spreading[run.count] = known | wrong.ordinals
                with run.random_state.replayed():
                    run = self.record(evaluate, batch, run.count)

    def _plan(self, run: "Run", evaluate: Evaluate, batch: Any, kind: Any) -> Plan:
        """What was proven about forward passes of this kind; proven again at the 1st, 2nd, 16th, 256th... of them."""
        unseen, reached = checks.unseen_parameters(run.losses, run.capture.sites, self.parameters)
        key = (
            kind,
            tuple(unseen),
            tuple(reached),
            run.capture.fingerprint,
            signature(run.capture.sites, run.count),
            tuple(module.training for module in self.model.modules()),
        )
        constants = run.state.constants
        plan, uses, known = self._plans.pop(key, (None, 0, None))
        left = [] if known is None else known.left(constants)
        if plan is None or known is None or uses in PROOFS or not plan.proven or left:
            self.note_moves(left)
            plan = self._prove(run, evaluate, batch)
            known = Snapshot(constants, moved=plan.moved)
        self._plans[key] = plan, uses + 1, known  # the latest last
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        if run.capture.routes and not self._warned:
            self._warned = True
            warnings.warn(
                "data decide which rows of the batch go where in this model (such as sorting by length or routing to "
                "experts), so ownership is proven at every step, which is slow; index with positions that do not "
                "depend on the data where you can",
                stacklevel=2,
            )
        return plan

    def note_moves(self, names: Sequence[str]) -> None:
        """Say, once, that a constant changes so often that most of the time goes into new proofs."""
        self._moves.update(names)
        often = [name for name in names if self._moves[name] == _OFTEN]
        if often:
            warnings.warn(
                f"{', '.join(map(repr, often))} changed between steps {_OFTEN} times by more than was proven, and the "
                "model is proven again each time, which is slow; change it less often, or let it be floating-point "
                "numbers that drift",
                stacklevel=2,
            )

    def _prove(self, run: "Run", evaluate: Evaluate, batch: Any) -> Plan:
        self.proofs += 1
        prover = Prover(self, run, evaluate, batch)
        buffers = [(x, x.detach().clone()) for _, x in self.model.named_buffers()] if self.data_independent else []
        try:
            plan = deterministically(self.device, prover.prove)
            self.proven = evaluate, batch
            return plan
        finally:
            self.draws |= prover.draws
            for x, before in buffers:
                x.data.copy_(before)

    def collect(self, run: "Run", plan: Plan, keep: Tensor, evaluate: Evaluate, batch: Any) -> Parts:
        """What the sites contribute to every parameter, by one backward pass."""
        parts = collect(run.capture.sites, plan, run.losses, keep, self.parameters)
        self._add_whole_model(parts, run, plan, keep, evaluate, batch)
        return parts

    def _add_whole_model(
        self, parts: Parts, run: "Run", plan: Plan, keep: Tensor, evaluate: Evaluate, batch: Any
    ) -> None:
        if not plan.whole:
            return
        names, why = sorted(plan.whole), plan.why
        remedy = SAME_WAY if run.capture.routes else _REMEDY
        self._recording = True
        try:
            again, grads = fallback.whole_model_gradients(
                self.model, evaluate, batch, run.count, names, run.random_state
            )
        except CALLS_FOR_REFUSAL as error:
            raise Refusal(
                f"no exact way to clip {why}. Running the model example by example failed too: {first_line(error)}. "
                f"{remedy}"
            ) from error
        finally:
            self._recording = False
        rough = torch.is_autocast_enabled(self.device.type) or tf32_anywhere(self.device)
        if not fallback.close(again.detach(), run.losses.detach(), rough=rough):
            raise Refusal(f"no exact way to clip {why}. Run example by example the model gives other losses. {remedy}")
        for name in names:
            parts[name] = [Part(Dense(scale_examples(grads[name], keep)))]

    def _choice(self, clip_norm: Choice) -> ValidChoice:
        """Validate clip norms before anything is computed."""
        return clip_norm if callable(clip_norm) else self.groups.clip_norms(clip_norm)

    def _clip_norms(self, choice: ValidChoice, norms: Tensor) -> tuple[float, ...]:
        """Return the clip norms: as they were validated, or chosen from the norms [B, K]."""
        return self.groups.clip_norms(choice(norms)) if callable(choice) else choice

    def _clip(self, parts: Parts, losses: Tensor, keep: Tensor, choice: ValidChoice) -> ClippedGradients:
        bundles = clipping.bundled(parts, self.groups)
        norms = clipping.group_norms(parts, bundles, self.groups, self.parameters, keep)
        clip_norms = self._clip_norms(choice, norms.by_group[keep])
        clip_norms_t = torch.tensor(clip_norms, dtype=norms.by_group.dtype, device=keep.device)
        # Where all is finite (one look at one flag), nothing has to be masked out.
        mask = None if bool(norms.is_usable.all()) else norms.is_usable
        factors = clipping.clip_factors(norms, clip_norms_t)
        sums = clipping.clipped_sums(parts, bundles, factors, self.groups, self.parameters, mask)
        return ClippedGradients.of(sums, norms.by_group, clip_norms, losses.detach(), keep)

    def _nothing(self, choice: ValidChoice) -> ClippedGradients:
        """An empty batch: zero sums."""
        sums = {name: torch.zeros_like(p, dtype=sum_dtype(p)) for name, p in self.parameters.items()}
        norms = torch.zeros(0, len(self.groups), device=self.device)
        empty = torch.zeros(0, device=self.device)
        return ClippedGradients(
            sums,
            empty,
            norms,
            self._clip_norms(choice, norms),
            empty,
            torch.zeros(0, dtype=torch.bool, device=self.device),
        )


_REMEDY = (
    "Register a rule for the function (qclip.register_rule), write it with torch functions that vmap understands, "
    "or freeze the parameter"
)


@dataclass(eq=False)
class Run:
    """A captured forward pass."""

    capture: Capture
    state: checks.State
    random_state: RandomState
    count: int
    losses: Any = None

    def enter(self, stack: ExitStack) -> None:
        """Start capturing, until the stack is closed. Compiled parts of the model run uncompiled meanwhile."""
        stack.enter_context(uncompiled())
        stack.enter_context(faults.avoided())
        stack.enter_context(self.capture)

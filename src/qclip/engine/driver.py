"""The eager driver: one forward pass, one backward pass to the sites, norms, clip factors, sums."""

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.capture import checks, faults
from qclip.engine.capture.capture import Capture, Observe
from qclip.engine.capture.checks import Evaluate
from qclip.engine.capture.constants import Snapshot
from qclip.engine.capture.forward_hooks import Watch, Watched
from qclip.engine.capture.repeat import Repeat, Script
from qclip.engine.gradients import clipping, fallback
from qclip.engine.gradients.clipping import sum_dtype
from qclip.engine.gradients.costs import CostModel
from qclip.engine.gradients.forms import Dense
from qclip.engine.gradients.parts import Awoken, Part, Parts, collect, prepare
from qclip.engine.gradients.plan import OneByOne, Plan, signature
from qclip.engine.groups import ClipNorm, GroupSpec, ValidChoice, partition
from qclip.engine.kernels.products import scale_examples
from qclip.engine.proof.precision import in_precision
from qclip.engine.proof.proof import PROOFS, SAME_WAY, NotBroadcast, NotTogether, require_owners
from qclip.engine.proof.prover import CALLS_FOR_REFUSAL, Prover, first_line
from qclip.engine.proof.traces import Repetition
from qclip.engine.randomness import RandomState
from qclip.engine.result import ClippedGradients
from qclip.engine.sharding import Reads, Sharding
from qclip.engine.torch_settings import deterministically, tf32_anywhere, uncompiled, warn_if_untested


def call(model: nn.Module, inputs: Any) -> Any:
    """Call the model: a dict holds keyword arguments, a tuple or list positional ones, others are one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if type(inputs) in (tuple, list):  # a named tuple is one argument
        return model(*inputs)
    return model(inputs)


Choice = ClipNorm | Callable[[Tensor], ClipNorm]
"""The clip norm of each group, or a function that chooses them given the norms [B, K] of the counted examples."""
Plans = dict[Any, tuple[Plan, int, Snapshot]]
"""By kind of forward pass: its plan, how often the plan was used, and the constants at its proof."""
log = logging.getLogger("qclip")
_OFTEN = 3
"""After how many proofs of the same kind, or caused by the same constant, the user is warned."""
_WAKES = 3
"""After how many proofs because of a gradient that was zero before the user is warned."""
_MOST_PLANS = 256
_PATIENCE = 2.0
"""A first proof that takes fewer seconds is not mentioned."""
_FIRST_PROOF = (
    "proving that the first batch does not mix examples took %.0f s; so it will at the second and the sixteenth of its "
    "kind, while other steps are fast"
)
_SAID = 3
"""How many new shapes are mentioned; the last time with a hint."""
_HINT = (
    ". Each costs about ten steps: pad texts to a few public lengths, as collate_fn=bucketed_lengths([32, 64, 128]) of "
    "qclip.integrations.transformers does. Further shapes are proven without a word"
)
_OF_ALL_EXAMPLES = 2
"""How many proofs of the same calls are on all examples of a batch; for other lengths of texts, a few will do then."""


class Engine:
    """Computes exact clipped gradient sums of one model.

    Guarantees:
        - Every example adds at most the clip norm of a group to the sum of that group.
        - An example that is masked out, or whose gradient is not finite, adds nothing.
        - A forward pass is refused unless the gradients of its examples are proven to be separate.

    Args:
        model: The model to train; compiled models are unwrapped.
        criterion: A loss module. Its buffers are watched like those of the model.
        groups: Which parameters are clipped together.
        data_independent_buffers: Glob patterns of buffers that may change in a forward pass because the change does not
            depend on the data, such as the power iteration of a spectral norm.
        costs: How norms are computed, and how much memory a step may use.
        plans: A store of plans to share with other engines of the same model and loss.
        sharding: How to reach parameters that `fully_shard` has sharded; None for a model that is not.

    Raises:
        Refusal: If the model has no trainable parameters, or is of a kind that cannot be clipped exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        criterion: nn.Module | None = None,
        groups: GroupSpec = "flat",
        data_independent_buffers: Sequence[str] = (),
        costs: CostModel | None = None,
        plans: Plans | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        warn_if_untested(torch.__version__)
        self.model = checks.unwrapped(model, may_be_sharded=sharding is not None)
        self.criterion = criterion
        self.sharding = sharding or Sharding()
        self.parameters = self._trainable()
        self.groups = partition(self.parameters, groups)
        self.data_independent_buffers = tuple(data_independent_buffers)
        self.costs = costs or CostModel()
        self._plans: Plans = {} if plans is None else plans
        self._not_broadcasts: dict[int, frozenset[int]] = {}  # by batch size
        self.proofs = 0
        """The number of proofs made so far."""
        self.proven: tuple[Evaluate, Any] | None = None
        """The evaluation and the batch of the last proof, for callers that prove more at the same time."""
        self.draws = False
        """Whether the evaluation drew random numbers in any proof."""
        self.own_draws = False
        """Whether examples drew other random numbers than in the batch, because they were run one at a time."""
        self._warned = False
        self._wakes = 0
        self._proofs_of_calls: Counter[int] = Counter()  # by the functions that were called, whatever the sizes
        self._moves: Counter[str] = Counter()
        self._shapes: set[Any] = set()  # of the examples of batches that were proven
        self._watch: Watch | None = None
        self._is_own_forward = False

    def _trainable(self) -> dict[str, nn.Parameter]:
        return checks.trainable(self.sharding.named_parameters(self.model))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.parameters.values())).device

    @torch.enable_grad()
    def clipped(
        self, evaluate: Evaluate, batch: Any, clip_norm: Choice, *, mask: Tensor | None = None
    ) -> ClippedGradients:
        """Compute the clipped gradient sum of a batch.

        Args:
            evaluate: Runs the model on a batch and returns one loss per example, [B].
            batch: A nest of tensors; those with one row per example have the examples in the first dimension.
            clip_norm: The clip norm of each group, or a function that chooses them given the norms [B, K] of the
                counted examples.
            mask: Which examples count, [B]; all by default.

        Returns:
            The clipped sums, the norms and the losses. An empty batch has sums of zero.

        Raises:
            Refusal: If the gradients cannot be clipped exactly; the message names the obstacle and a remedy.
        """
        clip_norms = self._validated(clip_norm)
        batch_size = batches.size(batch, mask)
        if batch_size == 0:
            return self._empty(clip_norms)
        run = self.record(evaluate, batch, batch_size)
        return self._finish(run, evaluate, batch, clip_norms, mask)

    def watch(self, batch_size: Callable[[], int | None]) -> Watch:
        """Capture every forward pass of the model from now on, where gradients are enabled.

        `finish` turns the last captured pass into a clipped sum.

        Args:
            batch_size: Returns the number of examples of the next forward pass; None if it is not to be captured.

        Returns:
            The hooks on the model.
        """

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watched | None:
            size = None if self._is_own_forward else batch_size()
            return Watched(self._begin((args, kwargs), size), args, kwargs) if size else None

        self._watch = Watch(self.model, begin)
        return self._watch

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Leave forward passes of the model alone inside: they are not the user's."""
        before, self._is_own_forward = self._is_own_forward, True
        try:
            yield
        finally:
            self._is_own_forward = before

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
        """Compute the clipped gradient sum of the last watched forward pass.

        Args:
            outputs: What the model returned, or a part of it. Anything computed from it belongs in the loss, where it
                can be proven to keep examples separate.
            targets: Passed to the loss.
            loss: Returns one loss per example, [B], given the outputs and the targets.
            clip_norm: As in `clipped`.
            mask: As in `clipped`.

        Returns:
            The clipped sums, the norms and the losses.

        Raises:
            Refusal: If there was no such forward pass, if its outputs were changed, or as in `clipped`.
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
        run.state.require_unmoved(self.model, self.criterion, self.data_independent_buffers)
        checks.require_unchanged_inputs(run.capture.sites)
        run.losses = loss(outputs, targets)
        batch = ((watched.args, watched.kwargs), targets)
        return self._finish(run, evaluate, batch, self._validated(clip_norm), mask, kind=loss)

    def record(
        self,
        evaluate: Evaluate,
        batch: Any,
        batch_size: int,
        *,
        keep_values: bool = False,
        observe: Observe | None = None,
        proving: bool = False,
    ) -> "Run":
        """Run the evaluation and capture every use of a parameter.

        Args:
            evaluate: Runs the model on a batch and returns one loss per example.
            batch: The batch.
            batch_size: The number of examples.
            keep_values: Whether sites keep a copy of their first output.
            observe: Called for every site.
            proving: Whether to compare the values of buffers, too: some writes do not raise the version of a tensor.

        Returns:
            The captured forward pass.

        Raises:
            Refusal: If the evaluation changes a parameter, a buffer, its input or an input of a site.
        """
        run = self._begin(batch, batch_size, keep_values=keep_values, observe=observe, proving=proving)
        versions = [(x, x._version) for x in batches.tensor_leaves(batch)]
        with torch.enable_grad(), self.unwatched(), ExitStack() as stack:
            run.enter(stack)
            run.losses = evaluate(batch)
        run.state.require_unmoved(self.model, self.criterion, self.data_independent_buffers)
        if any(x._version != version for x, version in versions):
            raise Refusal(
                "the model changes its input in place; let it make a new tensor (x = x - 1 instead of x -= 1)"
            )
        checks.require_unchanged_inputs(run.capture.sites)
        return run

    def repeat(
        self, evaluate: Evaluate, batch: Any, script: Script, observe: Observe | None = None
    ) -> tuple[Repeat, Tensor]:
        """Run the evaluation again, on a batch on which it makes the same calls as before.

        Args:
            evaluate: Runs the model on a batch and returns one loss per example.
            batch: The batch.
            script: The earlier forward pass.
            observe: Called for every site.

        Returns:
            The sites, and the losses.

        Raises:
            OtherCalls: If the evaluation makes other calls.
            Refusal: If it changes a parameter or a buffer.
        """
        repeat = Repeat(script, self.parameters, observe)
        with torch.enable_grad(), self.unwatched(), uncompiled(), faults.avoided(), repeat:
            losses = evaluate(batch)
        repeat.require_same()
        script.state.require_unmoved(self.model, self.criterion, self.data_independent_buffers)
        return repeat, losses

    @contextmanager
    def in_precision(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute in a precision inside, on copies of all parameters and buffers of a lower one."""
        modules = [self.model] if self.criterion is None else [self.model, self.criterion]
        own = self.parameters
        with in_precision(dtype, modules):
            self.parameters = self._trainable()
            try:
                yield
            finally:
                self.parameters = own

    def require_same_parameters(self) -> None:
        """Refuse a model whose trainable parameters are not those that the engine was made for."""
        current = self._trainable()
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
        batch_size: int,
        *,
        keep_values: bool = False,
        observe: Observe | None = None,
        proving: bool = False,
    ) -> "Run":
        """Return a capture that is ready to be entered."""
        checks.require_gradient_mode()
        checks.require_inputs(batch)
        self.require_same_parameters()
        state = checks.State.of(self.model, self.criterion, self.sharding, by_value=proving)
        capture = Capture(
            self.parameters,
            [*state.constants.values(), *batches.shared_tensors(batch, batch_size)],
            batch_size,
            attributes=checks.plain_attributes(self.model),
            not_broadcasts=self._not_broadcasts.get(batch_size, frozenset()),
            keep_values=keep_values,
            observe=observe,
        )
        return Run(capture, state, RandomState.now(self.device), batch_size, self._declared_buffers())

    def _finish(
        self,
        run: "Run",
        evaluate: Evaluate,
        batch: Any,
        clip_norms: ValidChoice,
        mask: Tensor | None,
        *,
        kind: Any = None,
    ) -> ClippedGradients:
        """Compute the clipped sum of a captured forward pass."""
        checks.require_range(run.capture.sites)
        checks.require_losses(run.losses, run.batch_size)
        is_counted = batches.full_mask(run.batch_size, mask, run.losses.device)
        with self.sharding.whole(self.model, lambda: self._reads_values(run, kind)) as reads:
            run, plan, parts = self.parts(run, is_counted, evaluate, batch, kind=kind, reads=reads)
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False), reads or nullcontext():
                prepare(parts, self.costs)
                self.sharding.require_all_well()
                clipped = self.clip(parts, run.losses, is_counted, clip_norms)
            if reads is not None and reads.allowed:
                self._note_reads(plan, found=reads.found)
            return clipped

    @torch.enable_grad()
    def parts(
        self,
        run: "Run",
        is_counted: Tensor,
        evaluate: Evaluate,
        batch: Any,
        *,
        kind: Any = None,
        reads: Reads | None = None,
    ) -> "tuple[Run, Plan, Parts]":
        """Return a plan for every parameter, and what the sites contribute to it; the run may have been made anew."""
        with faults.avoided():
            run, plan = self._settled(run, evaluate, batch, lambda run: self._plan(run, evaluate, batch, kind))
            try:
                return run, plan, self.collect(run, plan, is_counted, evaluate, batch, reads=reads)
            except Awoken:
                run, plan = self._proven_awake(run, evaluate, batch, kind)
                heard = replace(plan, silent=frozenset())
                return run, plan, self.collect(run, heard, is_counted, evaluate, batch, reads=reads)

    def _proven_awake(self, run: "Run", evaluate: Evaluate, batch: Any, kind: Any) -> "tuple[Run, Plan]":
        """Return a forward pass and a plan that is proven on this batch, where a site has its first gradient."""
        key, sites = self._kind(run, kind), signature(run.capture.sites, run.batch_size)
        asleep, uses, _ = self._plans.pop(key)
        run = self._again(run, evaluate, batch)
        names = [str(run.capture.sites[k]) for k in sorted(asleep.silent)]
        run, plan = self._settled(run, evaluate, batch, lambda run: self._plan(run, evaluate, batch, kind))
        known = self._plans.pop(self._kind(run, kind), None)
        if signature(run.capture.sites, run.batch_size) != sites:
            key = self._kind(run, kind)  # else of the first run: with all parameters in place fewer calls are made
        if plan.silent & asleep.silent:  # perturbed parameters hide it
            self.proofs += 1
            prover, hidden = Prover(self, run, evaluate, batch), plan
            plan = deterministically(self.device, lambda: prover.prove_at_rest(hidden))
            if known is not None:
                known = plan, max(uses, known[1]), known[2]  # else the next proof would hide it again
        if known is not None:
            self._plans[key] = known
        require_owners(Repetition(run.capture, run.losses, random=False), plan)
        self._wakes += 1
        if self._wakes == _WAKES and not self._warned:
            self._warned = True
            warnings.warn(
                _SLOW.format(f"the gradient at {names[0]} is zero in some steps and not in others"), stacklevel=2
            )
        return run, plan

    def _again(self, run: "Run", evaluate: Evaluate, batch: Any) -> "Run":
        """Record the same forward pass again."""
        with run.random_state.replayed():
            return self.record(evaluate, batch, run.batch_size)

    @torch.enable_grad()
    def prove(self, evaluate: Evaluate, batch: Any, batch_size: int) -> "tuple[Run, Plan]":
        """Return a forward pass on this batch, and a plan that is proven on it even if its kind is known already."""
        with faults.avoided():
            run = self.record(evaluate, batch, batch_size)
            checks.require_losses(run.losses, batch_size)
            return self._settled(run, evaluate, batch, lambda run: self._proven(run, evaluate, batch))

    def _settled(
        self, run: "Run", evaluate: Evaluate, batch: Any, find_plan: "Callable[[Run], Plan]"
    ) -> "tuple[Run, Plan]":
        """Find a plan; record the same forward pass again where a call turns out to be no broadcast."""
        while True:
            try:
                return run, find_plan(run)
            except NotBroadcast as wrong:
                self._not_broadcasts[run.batch_size] = frozenset(run.capture.not_broadcasts) | wrong.ordinals
                run = self._again(run, evaluate, batch)

    def _kind(self, run: "Run", kind: Any) -> Any:
        """Return a key that forward passes of one kind have in common."""
        unseen, reached = checks.unseen_parameters(run.losses, run.capture.sites, self.parameters)
        return (
            kind,
            tuple(unseen),
            tuple(reached),
            run.capture.fingerprint,
            signature(run.capture.sites, run.batch_size),
            tuple(module.training for module in self.model.modules()),
        )

    def _reads_values(self, run: "Run", kind: Any) -> bool:
        """Return whether the gradients of a run need values of parameters outside of its two passes, as proofs do."""
        plan, uses, snapshot = self._plans.get(self._kind(run, kind), (None, 0, None))
        if plan is None or snapshot is None or uses in PROOFS or not plan.proven:
            return True
        return plan.reads_values or bool(plan.silent) or bool(snapshot.left(run.state.readable_constants))

    def _note_reads(self, plan: Plan, *, found: bool) -> None:
        """Take note of whether the gradients of a plan were computed from values of parameters."""
        for key, (other, uses, snapshot) in self._plans.items():
            if other is plan:
                self._plans[key] = replace(plan, reads_values=found), uses, snapshot

    def _plan(self, run: "Run", evaluate: Evaluate, batch: Any, kind: Any) -> Plan:
        """Return the plan of forward passes of this kind; proven again at the 1st, 2nd, 16th, 256th... of them."""
        key, constants = self._kind(run, kind), run.state.readable_constants
        any_rows = kind, tuple(module.training for module in self.model.modules())
        wherever = run.capture.routes and key not in self._plans and any_rows in self._plans
        before = any_rows if wherever else key  # a plan for one example at a time holds wherever the rows go
        plan, uses, snapshot = known = self._plans.pop(before, (None, 0, None))
        left = [] if snapshot is None else snapshot.left(constants)
        if plan is None or snapshot is None or uses in PROOFS or not plan.proven or left:
            self.note_moves(left)
            if plan is None:
                self._say_new_shape(batch, run.batch_size)
            plan = self._proven(run, evaluate, batch)
            snapshot = Snapshot(constants, moved=plan.moved)
            if plan.one_by_one is not None and run.capture.routes:
                before = any_rows
            elif wherever and known[0] is not None and known[2] is not None:  # these rows can be told apart
                self._plans[any_rows] = known[0], uses + 1, known[2]
                before, uses = key, 0
        self._plans[before] = plan, uses + 1, snapshot  # the latest last
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        if plan.one_by_one is not None:
            self._warn_of_one_by_one(plan, run.batch_size)
        elif not plan.proven and not self._warned and (run.capture.routes or uses + 1 >= _OFTEN):
            self._warned = True
            warnings.warn(_slow(run, plan), stacklevel=2)
        return plan

    def _say_new_shape(self, batch: Any, batch_size: int) -> None:
        """Say that a step takes longer because its examples have another shape than any before."""
        tensors = [x for x in batches.tensor_leaves(batch) if batches.is_example_wise(x, batch_size)]
        shapes = tuple(x.shape[1:] for x in tensors)
        if shapes in self._shapes:
            return
        self._shapes.add(shapes)
        new = len(self._shapes) - 1
        if new == 0 or not tensors:
            return
        largest = max(tensors, key=lambda x: x[0].numel())
        log.log(
            logging.WARNING if new <= _SAID else logging.INFO,
            f"proving a new shape of batches, {tuple(largest.shape)}%s",
            _HINT * (new == _SAID),
        )

    def _warn_of_one_by_one(self, plan: Plan, batch_size: int) -> None:
        """Warn, once, that the model is run one example at a time."""
        self.own_draws |= plan.one_by_one is not None and plan.one_by_one.own_draws
        if self._warned:
            return
        self._warned = True
        draws = " Each of them draws random numbers of its own." * self.own_draws
        again = f" That they add up to the batch's is proven at every step: {plan.doubt}." * bool(plan.doubt)
        warnings.warn(
            f"examples are run through the model one at a time, which is exact and slow: {batch_size} forward and "
            f"backward passes for this batch of {batch_size}.{draws}{again} The reason: {plan.why}",
            stacklevel=2,
        )

    def note_moves(self, names: Sequence[str]) -> None:
        """Warn, once, that a constant changes so often that most of the time is spent on proofs."""
        self._moves.update(names)
        often = [name for name in names if self._moves[name] == _OFTEN]
        if often:
            warnings.warn(
                f"{', '.join(map(repr, often))} changed between steps {_OFTEN} times by more than was proven, and the "
                "model is proven again each time, which is slow; change it less often, or let it be floating-point "
                "numbers that drift",
                stacklevel=2,
            )

    def _proven(self, run: "Run", evaluate: Evaluate, batch: Any) -> Plan:
        self.proofs += 1
        prover = Prover(self, run, evaluate, batch)
        buffers = self._declared_buffers()
        calls = hash(tuple(call.function for call in run.capture.record))
        on_few, started = self._proofs_of_calls[calls] >= _OF_ALL_EXAMPLES, time.process_time()
        try:
            plan = deterministically(self.device, lambda: prover.prove(on_few=on_few))
            self.proven = evaluate, batch
            self._proofs_of_calls[calls] += plan.proven and run.batch_size > 1
            if self.proofs == 1 and (seconds := time.process_time() - started) > _PATIENCE:
                log.warning(_FIRST_PROOF, seconds)
            return plan
        finally:
            self.draws |= prover.draws
            _restore(buffers)

    def collect(
        self,
        run: "Run",
        plan: Plan,
        is_counted: Tensor,
        evaluate: Evaluate,
        batch: Any,
        *,
        reads: Reads | None = None,
    ) -> Parts:
        """Return what the sites contribute to every parameter, by one backward pass, and watch reads from then on."""
        with ExitStack() as stack:
            after_backward = (lambda: None) if reads is None else (lambda: stack.enter_context(reads))
            if plan.one_by_one is not None:
                _, grads = self.one_by_one(run, evaluate, batch, is_counted, plan.one_by_one)
                return _dense_parts(grads, is_counted)
            parts = collect(
                run.capture.sites, plan, run.losses, is_counted, self.parameters, after_backward=after_backward
            )
            if plan.whole:
                parts |= self._whole_model_parts(run, plan, is_counted, evaluate, batch)
            return parts

    def _whole_model_parts(self, run: "Run", plan: Plan, is_counted: Tensor, evaluate: Evaluate, batch: Any) -> Parts:
        """Return the contributions to parameters that need gradients of the whole model, example by example."""
        remedy = SAME_WAY if run.capture.routes else _REMEDY
        try:
            with self.unwatched(), self._from_the_start(run):
                again, grads = fallback.whole_model_gradients(
                    self.model, evaluate, batch, run.batch_size, sorted(plan.whole), run.random_state
                )
        except CALLS_FOR_REFUSAL as error:
            raise NotTogether(
                f"no exact way to clip {plan.why}",
                remedy,
                f"Running all examples by vmap failed too: {first_line(error).rstrip('.')}.",
            ) from error
        rough = torch.is_autocast_enabled(self.device.type) or tf32_anywhere(self.device)
        if not fallback.close(again.detach(), run.losses.detach(), rough=rough):
            raise NotTogether(f"no exact way to clip {plan.why}", remedy, "Run by vmap the model gives other losses.")
        return _dense_parts(grads, is_counted)

    def one_by_one(
        self, run: "Run", evaluate: Evaluate, batch: Any, is_counted: Tensor, how: OneByOne
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the losses and gradients of a batch, one example at a time (`fallback.one_by_one_gradients`)."""

        def evaluate_one(one: Any) -> Tensor:
            _restore(run.buffers)  # for every example those that the batch found
            return evaluate(one)

        def draws(i: int) -> AbstractContextManager[None]:
            return run.random_state.seeded(i) if how.own_draws else run.random_state.replayed()

        with self.unwatched(), uncompiled(), self._from_the_start(run):
            found = fallback.one_by_one_gradients(
                evaluate_one, batch, is_counted, self.parameters, draws, in_copies=how.in_copies
            )
        run.state.require_unmoved(self.model, self.criterion, self.data_independent_buffers)
        return found

    @contextmanager
    def _from_the_start(self, run: "Run") -> Iterator[None]:
        """Run the model from the declared buffers that a captured pass found; leave those that are there now."""
        now = self._declared_buffers()
        _restore(run.buffers)
        try:
            yield
        finally:
            _restore(now)

    def _declared_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Return all buffers and their values, if some are declared to move in a forward pass."""
        buffers = self.model.buffers() if self.data_independent_buffers else ()
        return [(x, x.detach().clone()) for x in buffers]

    def _validated(self, clip_norm: Choice) -> ValidChoice:
        """Validate clip norms before anything is computed."""
        return clip_norm if callable(clip_norm) else self.groups.clip_norms(clip_norm)

    def clip(self, parts: Parts, losses: Tensor, is_counted: Tensor, clip_norms: ValidChoice) -> ClippedGradients:
        """Clip and sum prepared contributions.

        Args:
            parts: The contributions to every parameter.
            losses: One loss per example, [B].
            is_counted: Which examples count, [B].
            clip_norms: One clip norm per group as a tuple, or a function that chooses them.

        Returns:
            The clipped sums, the norms and the losses.
        """
        return clipping.clip(
            parts, self.groups, self.parameters, losses, is_counted, clip_norms, keep=self.sharding.summed
        )

    def _empty(self, clip_norms: ValidChoice) -> ClippedGradients:
        """Return the result for an empty batch: sums of zero."""
        sums = {name: torch.zeros_like(p, dtype=sum_dtype(p)) for name, p in self.parameters.items()}
        norms = torch.zeros(0, len(self.groups), device=self.device)
        losses = torch.zeros(0, device=self.device)
        is_counted = torch.zeros(0, dtype=torch.bool, device=self.device)
        return ClippedGradients(sums, losses, norms, self.groups.chosen(clip_norms, norms), losses, is_counted)


def _slow(run: "Run", plan: Plan) -> str:
    """Return a warning that a model is proven at every step."""
    if run.capture.routes and not run.capture.counted_by:
        return (
            "data decide which rows of the batch go where in this model (such as sorting by length or routing to "
            f"experts), at {run.capture.routed_by}, so ownership is proven at every step, which is slow; index with "
            "positions that do not depend on the data where you can"
        )
    return _SLOW.format(plan.doubt)


_SLOW = "the model is proven at every step, which is slow: {}"


def _restore(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, before in buffers:
        x.data.copy_(before)


def _dense_parts(grads: Mapping[str, Tensor], is_counted: Tensor) -> Parts:
    """Return per-example gradients [B, *shape] as parts; those of other examples than the counted ones are zero."""
    return {name: [Part(Dense(scale_examples(grad, is_counted)))] for name, grad in grads.items()}


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
    batch_size: int
    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    """All buffers and their values before the pass, if some are declared to move in it."""
    losses: Any = None

    def enter(self, stack: ExitStack) -> None:
        """Start capturing, until the stack is closed; compiled parts of the model run uncompiled until then."""
        stack.enter_context(uncompiled())
        stack.enter_context(faults.avoided())
        stack.enter_context(self.capture)

"""The compiled driver: the whole physical step as one compiled graph for each kind of batch.

The eager driver proves the first batch of a kind on a few of its examples. The step is then traced (`graph`) and
compiled (`backend`). The compiled step must give the norms and sums that the eager driver gives, and the norm of an
example must not change when others are replaced (`checks`). A step that cannot be traced runs eager, and a warning says
why, once.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qclip import _validate as check
from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.batch import to_device_async
from qclip.engine.capture import checks
from qclip.engine.capture.checks import Evaluate, State
from qclip.engine.capture.constants import Snapshot
from qclip.engine.compiled.backend import Replay, compile_graph
from qclip.engine.compiled.checks import Trials
from qclip.engine.compiled.graph import Function, Outputs, as_a_step_runs, inputs_of, model_tensors, outputs_of, trace
from qclip.engine.compiled.rewrites import is_random
from qclip.engine.driver import Choice, Engine
from qclip.engine.gradients import clipping
from qclip.engine.gradients.plan import Plan
from qclip.engine.proof.few import NUM_PROVEN
from qclip.engine.proof.proof import PROOFS
from qclip.engine.randomness import RandomState
from qclip.engine.result import ClippedGradients
from qclip.engine.torch_settings import determinism_level, tf32_settings

MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of `torch.compile`; "reduce-overhead" and "max-autotune" replay CUDA graphs."""
MOST_KINDS: Final = 16
"""For how many kinds of batches steps are compiled."""
UNPROVEN: Final = (
    "could not attribute rows to examples on this batch (a gradient is zero, not finite, or in rows of no example); "
    "retrying on the next"
)
DIFFERENT: Final = "the compiled step does not give what the eager one gives"

Announce = Callable[[str], AbstractContextManager[Any]]


@dataclass(eq=False)
class Step:
    """A compiled physical step."""

    run: Function
    plan: Plan
    uses: int = 0
    draws: bool = False
    """Whether it draws random numbers."""
    proven_with: Snapshot = field(default_factory=lambda: Snapshot({}, moved=False))
    """The constants at the last proof."""


class ModelTensors(NamedTuple):
    """The parameters and buffers of a model at some step."""

    all: list[Tensor]
    kinds: tuple[Any, ...]
    """Their shapes, strides, dtypes, devices and flags, and the flags of the modules."""
    inputs: list[Tensor]
    """The first inputs of a graph."""
    constants: dict[str, Tensor]
    """The tensors that training does not move."""


class Compiled:
    """Computes clipped gradient sums of an engine's model by compiled steps.

    With CUDA graphs the next step overwrites the sums of a result: copy those that are needed longer.

    Args:
        engine: The eager driver.
        mode: A mode of `torch.compile`, or True for the mode that suits the device: CUDA graphs on a GPU.
        slots: The size to which smaller batches are padded, so that one compiled step serves them all.
        announce: Entered while a step is compiled, which takes from seconds to minutes; called with a message.
    """

    def __init__(
        self,
        engine: Engine,
        mode: str | Literal[True] = True,
        *,
        slots: int | None = None,
        announce: Announce = nullcontext,
    ) -> None:
        self.engine = engine
        suited = "reduce-overhead" if engine.device.type == "cuda" else "default"
        self._mode = check.choice("compile", suited if isinstance(mode, bool) else mode, MODES)
        self._slots = slots
        self._announce = announce
        self._steps: dict[Any, Step | str] = {}
        self._warned: set[str] = set()
        self._clip_norms: dict[tuple[float, ...], Tensor] = {}
        self._model: ModelTensors | None = None
        self._trials = Trials(engine)

    def clipped(
        self, evaluate: Evaluate, batch: Any, clip_norm: Choice, *, mask: Tensor | None = None, wait: bool = True
    ) -> ClippedGradients:
        """Compute the clipped gradient sum of a batch, as `Engine.clipped` does, up to rounding.

        Args:
            evaluate: Runs the model on a batch and returns one loss per example, [B].
            batch: A nest of tensors; those with one row per example have the examples in the first dimension.
            clip_norm: The clip norm of each group. With a function that chooses them the step runs eager.
            mask: Which examples count, [B]; all by default.
            wait: Whether to wait for the device. If not, an example that is not finite may have spoilt the sums, until
                the result is resolved (`ClippedGradients.resolve`).

        Returns:
            The clipped sums, the norms and the losses.
        """
        engine = self.engine
        if engine.data_independent_buffers:
            self.say("declared buffers move in the forward pass")
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        if callable(clip_norm):
            self.say("the threshold looks at the batch's norms before it clips")
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        clip_norms = engine.groups.clip_norms(clip_norm)
        batch_size = batches.size(batch, mask)
        if batch_size == 0:
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        checks.require_gradient_mode()
        checks.require_inputs(batch)
        full_mask = batches.full_mask(batch_size, mask, engine.device)
        padded, is_counted = _padded(batches.contiguous(batch), full_mask, max(batch_size, self._slots or 0))
        step, model = self._step(evaluate, padded, is_counted)
        if isinstance(step, str):
            self.say(step)
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        result = self._run(step, model, padded, is_counted, clip_norms, full_mask)
        return result.resolve() if wait else result

    def _run(
        self,
        step: Step,
        model: Sequence[Tensor],
        batch: Any,
        is_counted: Tensor,
        clip_norms: tuple[float, ...],
        mask: Tensor,
    ) -> ClippedGradients:
        """Run a step on a padded batch; return the result without the padding."""
        drawn_from = RandomState.now(self.engine.device) if step.draws else None
        sums, by_group, losses, is_finite = self._outputs(step, model, batch, is_counted, clip_norms)
        batch_size, is_usable = len(mask), is_finite & is_counted
        is_view = isinstance(step.run, Replay)
        # Without the sums: with them, `recompute` would keep them alive until Python looks for cycles.
        norms, losses = by_group[:batch_size].clone(), losses[:batch_size].clone()
        result = ClippedGradients.of({}, norms, clip_norms, losses, mask, is_view)
        read = [(x, x._version) for x in (*model, *batches.tensor_leaves(batch))]

        def recompute() -> ClippedGradients:
            """Replace the examples that are not finite by one that is, and do not count them.

            The others keep their random numbers: otherwise one example would change what all of them add.
            """
            if any(x._version != version for x, version in read):
                raise Refusal(
                    "an example was not finite, and its batch has to be computed again; but the batch or the model was "
                    "changed in place meanwhile: leave both alone until the logical batch is complete"
                )
            index = torch.arange(len(is_counted), device=is_usable.device)
            index = torch.where(is_usable, index, is_usable.to(torch.uint8).argmax())
            others = batches.select(batch, index, len(is_counted))
            with nullcontext() if drawn_from is None else drawn_from.replayed():
                sums, _, _, now_finite = self._outputs(step, model, others, is_usable, clip_norms)
            if not bool(is_usable.any()):
                sums = [torch.zeros_like(value) for value in sums]
            elif not bool(now_finite.all()):
                raise Refusal(
                    "an example is finite or not by the random numbers that the model draws, which a compiled step "
                    "cannot leave out; train without compile"
                )
            return replace(result, sums=self._named(sums))

        return replace(result, sums=self._named(sums), all_finite=is_finite.all(), recompute=recompute)

    def _named(self, sums: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.engine.parameters, sums, strict=True))

    def _outputs(
        self, step: Step, model: Sequence[Tensor], batch: Any, is_counted: Tensor, clip_norms: tuple[float, ...]
    ) -> Outputs:
        return outputs_of(step.run, inputs_of(model, batch, is_counted, self._on_device(clip_norms)))

    def _on_device(self, clip_norms: tuple[float, ...]) -> Tensor:
        """Return the clip norms as a tensor [K] on the device; those of the last step are kept."""
        if clip_norms not in self._clip_norms:
            tensor = torch.tensor(clip_norms, dtype=clipping.norm_dtype(self.engine.parameters))
            self._clip_norms = {clip_norms: to_device_async(tensor, self.engine.device)}
        return self._clip_norms[clip_norms]

    def _step(self, evaluate: Evaluate, batch: Any, is_counted: Tensor) -> tuple[Step | str, Sequence[Tensor]]:
        """Return the compiled step for batches of this kind, or why there is none; and the model's tensors.

        The proof of a step is repeated now and then.
        """
        model = self._model_tensors()
        key = self._key(evaluate, batch, model)
        step = self._steps.get(key)
        if step is None and len(self._steps) >= MOST_KINDS:
            reason = "batches are of many kinds; pad them to a few shapes, and leave text and changing numbers out"
            return reason, model.inputs
        left = step.proven_with.left(model.constants) if isinstance(step, Step) else []
        if step is None or (isinstance(step, Step) and (left or step.uses in PROOFS)):
            self.engine.note_moves(left)
            # Proofs and trials leave the generators as they were: a resumed run makes them again.
            with RandomState.now(self.engine.device).replayed():
                step = self._built(evaluate, batch, is_counted, step)
            if step != UNPROVEN:  # another batch may show more
                self._steps[key] = step
                if self.engine.device.type == "cuda":  # else gradients settle amidst what a proof took, and keep it
                    torch.cuda.empty_cache()
            model = self._model_tensors()  # a forward pass may have replaced a buffer
            if isinstance(step, Step):
                step.proven_with = Snapshot(model.constants, moved=step.plan.moved)
        if isinstance(step, Step):
            step.uses += 1
        return step, model.inputs

    def _key(self, evaluate: Evaluate, batch: Any, model: ModelTensors) -> Any:
        """Return everything that is constant in a graph: another value means another graph."""
        leaves, structure = pytree.tree_flatten(batch)
        device = self.engine.device.type
        return (
            evaluate,
            structure,
            tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves),
            model.kinds,
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            tf32_settings(),
            determinism_level(),
            torch.get_num_threads(),
        )

    def _model_tensors(self) -> ModelTensors:
        """Return the model's tensors; all checks are made only where one is new or has another shape or flag."""
        modules = _modules(self.engine.model)
        found = [x for m in modules for held in (m._parameters, m._buffers) for x in held.values() if x is not None]
        flags = tuple([m.training for m in modules])
        kinds = (flags, *[(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in found])
        model = self._model
        if model is None or model.kinds != kinds or not all(map(is_, model.all, found)):
            self.engine.require_same_parameters()
            constants = State.of(self.engine.model, self.engine.criterion).constants
            model = self._model = ModelTensors(found, kinds, model_tensors(self.engine), constants)
        return model

    def _built(self, evaluate: Evaluate, batch: Any, is_counted: Tensor, earlier: Step | None) -> Step | str:
        """Return a step that is proven on a few examples of this batch, or why there is none.

        An ``earlier`` step is returned if the proof leads to the same plan.
        """
        batch_size = len(is_counted)
        num_proven = min(batch_size, NUM_PROVEN)
        few = batches.select(batch, slice(num_proven), batch_size)
        run, plan = self.engine.prove(evaluate, few, num_proven)
        reason = _obstacle(plan, routes=run.capture.routes)
        if earlier is not None and (earlier.plan == plan or reason == UNPROVEN):
            return earlier
        if reason is not None:
            return reason
        with self._announce("compiling the private step"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's compiler warns of its own parts
                    traced = trace(self.engine, run, plan, evaluate, batch, is_counted, self._trials.clip_norms)
                    draws = any(map(is_random, traced.graph.graph.nodes))
                    if draws and not self._trials.draws_alike(run, plan, evaluate, few, num_proven):
                        return DIFFERENT
                    with as_a_step_runs(self.engine.device):
                        compiled = compile_graph(traced.graph, self._trials.inputs(batch, is_counted), self._options())
                    step = Step(lambda inputs: compiled(*inputs), plan)
                    del run  # and the activations it holds
                    step.draws = self._trials.trial(step.run, batch, is_counted).is_random
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever torch's tracers and compilers raise
                return _in_words(error)
            is_proven = torch.arange(batch_size, device=is_counted.device) < num_proven
            if not self._trials.agrees(step.run, traced.methods, evaluate, batch, is_proven):
                return DIFFERENT
            self._trials.require_separation(step.run, batch, batch_size)
            self._record(step, batch, is_counted)
        return step

    def _record(self, step: Step, batch: Any, is_counted: Tensor) -> None:
        """Record a step as a CUDA graph, if the mode says so and all inputs are on a GPU: others would be frozen."""
        inputs = self._trials.inputs(batch, is_counted)
        if self._mode not in ("reduce-overhead", "max-autotune") or not all(x.is_cuda for x in inputs):
            return
        plain, step.run = step.run, Replay(step.run, fixed=len(self._model_tensors().inputs))
        try:
            self._trials.trial(step.run, batch, is_counted)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as a synchronisation inside
            step.run = plain
            self.say(_in_words(error), what="not recorded as a CUDA graph")

    def _options(self) -> dict[str, Any]:
        """Return the options of torch's compiler. CUDA graphs are recorded here, where memory can be fixed."""
        tuned = "max-autotune-no-cudagraphs" if self._mode.startswith("max-autotune") else "default"
        # On a CPU channels-last images would be transposed for every grouped convolution, and back.
        on_cpu = self.engine.device.type == "cpu"
        options = {**torch._inductor.list_mode_options(tuned), "layout_optimization": not on_cpu}
        # Otherwise sums move to the end of the graph, where they are used, and hold all that they need until then.
        options["reorder_for_locality"] = False
        # Otherwise one kernel would make the scaled gradients of all layers, and hold them at the same time.
        return options if on_cpu else {**options, "max_fusion_size": 8}

    def say(self, reason: str, *, what: str = "not compiled, runs eager") -> None:
        """Warn, once for each reason, that a step is slower than the user asked for."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"{what}: {reason}", stacklevel=_levels_out())


def _levels_out() -> int:
    """Return how many frames up the caller of qclip is, for a warning."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("qclip."):
        frame, levels = frame.f_back, levels + 1
    return levels


def _modules(root: nn.Module) -> list[nn.Module]:
    """Return all modules, each once: at every step, so without the names that torch's own walk makes."""
    modules, seen = [root], {root}
    for module in modules:  # which grows
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return modules


def _padded(batch: Any, mask: Tensor, slots: int) -> tuple[Any, Tensor]:
    """Return the batch with its first example repeated up to ``slots`` examples, and which of them count."""
    batch_size = len(mask)
    if batch_size == slots:
        return batch, mask
    index = torch.arange(slots, device=mask.device)
    is_real = index < batch_size
    index = torch.where(is_real, index, 0)
    return batches.select(batch, index, batch_size), mask[index] & is_real


def _obstacle(plan: Plan, *, routes: bool) -> str | None:
    """Return why one graph cannot carry out a plan, or None."""
    if plan.one_by_one is not None:
        return f"examples are run one at a time: {plan.why}"
    if routes:
        return "data decide which rows of the batch go where"
    if not plan.proven or plan.silent:
        return UNPROVEN
    if plan.whole:
        return f"gradients of the whole model, example by example, are needed for {plan.why}"
    return None


def _in_words(error: Exception) -> str:
    """Return a one-line reason, given an error of torch's tracers or compilers."""
    inner = getattr(error, "inner_exception", error)  # of torch's compilers
    if "DataDependent" in type(inner).__name__:
        return "Python code of the model looks at values (an if, int() or item() of a tensor)"
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__

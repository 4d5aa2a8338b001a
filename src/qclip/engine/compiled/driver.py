"""The compiled driver: the whole physical step as one compiled graph for each kind of batch.

The first batch of a kind is proven on a few of its examples by the eager driver, traced (`graph`) and
compiled; the compiled step must then give the norms that the eager one gave, and leave an example's norm alone when
others are replaced. What cannot be traced runs eager, and says why once.
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
from qclip.engine.compiled.checks import Trials
from qclip.engine.compiled.graph import Function, Outputs, as_a_step_runs, inputs_of, model_tensors, outputs_of, trace
from qclip.engine.compiled.machine_code import machine_code
from qclip.engine.compiled.replay import Replay
from qclip.engine.compiled.rewrites import is_random
from qclip.engine.driver import Choice, Engine
from qclip.engine.gradients import clipping
from qclip.engine.gradients.plan import Plan
from qclip.engine.proof.proof import PROOFS
from qclip.engine.randomness import RandomState
from qclip.engine.result import ClippedGradients
from qclip.engine.torch_settings import determinism_level, tf32_settings

MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Those of `torch.compile`; "reduce-overhead" and "max-autotune" replay CUDA graphs."""
PROVEN: Final = 5
"""How many examples a kind of batch is proven on: few, to be quick, and no multiple or part of usual lengths."""
MOST_KINDS: Final = 16
"""For how many kinds of batches steps are compiled."""
UNPROVEN: Final = (
    "the first examples do not prove which rows are whose: some gradient is zero, not finite or in no one's"
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


class Tensors(NamedTuple):
    """The parameters and buffers of a model, as they were found."""

    found: list[Tensor]
    kinds: tuple[Any, ...]
    """Their shapes, strides, precisions, devices and flags, and the modules' flags."""
    tensors: list[Tensor]
    """In the order of a graph's inputs."""
    constants: dict[str, Tensor]
    """Those that training does not move."""


class Compiled:
    """Clipped gradient sums of an engine's model, by compiled steps.

    ``mode`` is one of torch.compile's, or True for the one that suits the device: CUDA graphs on a GPU. Batches of
    fewer than ``slots`` examples are padded to as many, so that one compiled step serves them all. ``announce`` is
    told when a step is being compiled, which takes from seconds to minutes.

    With CUDA graphs the sums of a result are overwritten by the next step: copy what is to be kept.
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
        self._said: set[str] = set()
        self._limits: dict[tuple[float, ...], Tensor] = {}
        self._tensors: Tensors | None = None
        self._trials = Trials(engine)

    def clipped(
        self, evaluate: Evaluate, batch: Any, clip_norm: Choice, *, mask: Tensor | None = None, wait: bool = True
    ) -> ClippedGradients:
        """As `Engine.clipped`, to rounding.

        Without ``wait`` nothing waits for the device: the sums may then be spoilt by an example that is not finite,
        until the result is `ClippedGradients.resolve`d.
        """
        engine = self.engine
        if engine.data_independent:
            self.say("declared buffers move in the forward pass")
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        if callable(clip_norm):
            self.say("the threshold looks at the batch's norms before it clips")
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        thresholds = engine.groups.clip_norms(clip_norm)
        count = batches.size(batch, mask)
        if count == 0:
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        checks.require_gradient_mode()
        checks.require_inputs(batch)
        keep = batches.full_mask(count, mask, engine.device)
        padded, counted = _padded(batches.contiguous(batch), keep, max(count, self._slots or 0))
        step, model = self._step(evaluate, padded, counted)
        if isinstance(step, str):
            self.say(step)
            return engine.clipped(evaluate, batch, clip_norm, mask=mask)
        result = self._run(step, model, padded, counted, thresholds, keep)
        return result.resolve() if wait else result

    def _run(
        self,
        step: Step,
        model: Sequence[Tensor],
        batch: Any,
        counted: Tensor,
        thresholds: tuple[float, ...],
        keep: Tensor,
    ) -> ClippedGradients:
        """The result for the examples ``keep`` of a padded batch."""
        drawn_from = RandomState.now(self.engine.device) if step.draws else None
        sums, by_group, losses, finite = self._outputs(step, model, batch, counted, thresholds)
        count, usable = len(keep), finite & counted
        is_view = isinstance(step.run, Replay)
        # Without the sums, which would live as long as their own repair otherwise: until Python looks for cycles.
        result = ClippedGradients.of({}, by_group[:count].clone(), thresholds, losses[:count].clone(), keep, is_view)
        read = [(x, x._version) for x in (*model, *batches.tensor_leaves(batch))]

        def recompute() -> ClippedGradients:
            """With the examples that are not finite replaced by one that is, and not counted.

            The others keep their random numbers: else one example would change what all of them add.
            """
            if any(x._version != version for x, version in read):
                raise Refusal(
                    "an example was not finite, and its batch has to be computed again; but the batch or the model was "
                    "changed in place meanwhile: leave both alone until the logical batch is complete"
                )
            index = torch.arange(len(counted), device=usable.device)
            index = torch.where(usable, index, usable.to(torch.uint8).argmax())
            others = batches.select(batch, index, len(counted))
            with nullcontext() if drawn_from is None else drawn_from.replayed():
                sums, _, _, now_finite = self._outputs(step, model, others, usable, thresholds)
            if not bool(usable.any()):
                sums = [torch.zeros_like(value) for value in sums]
            elif not bool(now_finite.all()):
                raise Refusal(
                    "an example is finite or not by the random numbers that the model draws, which a compiled step "
                    "cannot leave out; train without compile"
                )
            return replace(result, sums=self._named(sums))

        return replace(result, sums=self._named(sums), all_finite=finite.all(), recompute=recompute)

    def _named(self, sums: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.engine.parameters, sums, strict=True))

    def _outputs(
        self, step: Step, model: Sequence[Tensor], batch: Any, counted: Tensor, thresholds: tuple[float, ...]
    ) -> Outputs:
        return outputs_of(step.run, inputs_of(model, batch, counted, self._limit(thresholds)))

    def _limit(self, thresholds: tuple[float, ...]) -> Tensor:
        """The thresholds on the device; those of the last step are kept."""
        if thresholds not in self._limits:
            limits = torch.tensor(thresholds, dtype=clipping.norm_dtype(self.engine.parameters))
            self._limits = {thresholds: to_device_async(limits, self.engine.device)}
        return self._limits[thresholds]

    def _step(self, evaluate: Evaluate, batch: Any, counted: Tensor) -> tuple[Step | str, Sequence[Tensor]]:
        """The compiled step for batches of this kind, or why there is none, and the model's tensors, its first inputs.

        The proof of a step is repeated now and then.
        """
        model = self._model()
        key = self._key(evaluate, batch, model)
        step = self._steps.get(key)
        if step is None and len(self._steps) >= MOST_KINDS:
            reason = "batches are of many kinds; pad them to a few shapes, and leave text and changing numbers out"
            return reason, model.tensors
        left = step.proven_with.left(model.constants) if isinstance(step, Step) else []
        if step is None or (isinstance(step, Step) and (left or step.uses in PROOFS)):
            self.engine.note_moves(left)
            # Proofs and trials leave the generators as they were: a resumed run makes them again.
            with RandomState.now(self.engine.device).replayed():
                step = self._built(evaluate, batch, counted, step)
            if step != UNPROVEN:  # another batch may tell more
                self._steps[key] = step
                if self.engine.device.type == "cuda":  # else gradients settle amidst what a proof took, and keep it
                    torch.cuda.empty_cache()
            model = self._model()  # a forward pass may have replaced a buffer
            if isinstance(step, Step):
                step.proven_with = Snapshot(model.constants, moved=step.plan.moved)
        if isinstance(step, Step):
            step.uses += 1
        return step, model.tensors

    def _key(self, evaluate: Evaluate, batch: Any, model: "Tensors") -> Any:
        """What is frozen in a graph: another value means another graph."""
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

    def _model(self) -> "Tensors":
        """The model's tensors; walked through with all checks only where one is new or has another shape or flag."""
        modules = _modules(self.engine.model)
        found = [x for m in modules for each in (m._parameters, m._buffers) for x in each.values() if x is not None]
        flags = tuple([m.training for m in modules])
        kinds = (flags, *[(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in found])
        known = self._tensors
        if known is None or known.kinds != kinds or not all(map(is_, known.found, found)):
            self.engine.require_same_parameters()
            constants = State.of(self.engine.model, self.engine.criterion).constants
            known = self._tensors = Tensors(found, kinds, model_tensors(self.engine), constants)
        return known

    def _built(self, evaluate: Evaluate, batch: Any, counted: Tensor, known: Step | None) -> Step | str:
        """A step, proven on a few examples of this batch; the ``known`` one if that is dealt with in the same way."""
        count = len(counted)
        few = min(count, PROVEN)
        part = batches.select(batch, slice(few), count)
        run, plan = self.engine.prove(evaluate, part, few)
        reason = _obstacle(plan, routes=run.capture.routes)
        if known is not None and (known.plan == plan or reason == UNPROVEN):
            return known
        if reason is not None:
            return reason
        with self._announce("compiling the private step"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's compiler warns of its own parts
                    graph = trace(self.engine, run, plan, evaluate, batch, counted, self._trials.limits)
                    draws = any(map(is_random, graph.graph.nodes))
                    if draws and not self._trials.draws_alike(run, plan, evaluate, part, few):
                        return DIFFERENT
                    with as_a_step_runs(self.engine.device):
                        compiled = machine_code(graph, self._trials.inputs(batch, counted), self._options())
                    step = Step(lambda inputs: compiled(*inputs), plan)
                    del run  # and the activations it holds
                    step.draws = self._trials.trial(step.run, batch, counted).random
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever torch's tracers and compilers raise
                return _in_words(error)
            if not self._trials.agrees(step.run, evaluate, batch, torch.arange(count, device=counted.device) < few):
                return DIFFERENT
            self._trials.require_separation(step.run, batch, count)
            self._record(step, batch, counted)
        return step

    def _record(self, step: Step, batch: Any, counted: Tensor) -> None:
        """As a CUDA graph, where that is asked for and can be done; what lies elsewhere would be frozen in it."""
        inputs = self._trials.inputs(batch, counted)
        if self._mode not in ("reduce-overhead", "max-autotune") or not all(x.is_cuda for x in inputs):
            return
        plain, step.run = step.run, Replay(step.run, fixed=len(self._model().tensors))
        try:
            self._trials.trial(step.run, batch, counted)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as a synchronisation inside
            step.run = plain
            self.say(_in_words(error), what="not recorded as a CUDA graph")

    def _options(self) -> dict[str, Any]:
        """For torch's compiler. CUDA graphs are replayed here, where memory can be fixed."""
        tuned = "max-autotune-no-cudagraphs" if self._mode.startswith("max-autotune") else "default"
        # On a CPU channels-last images would be transposed for every grouped convolution, and back.
        on_cpu = self.engine.device.type == "cpu"
        options = {**torch._inductor.list_mode_options(tuned), "layout_optimization": not on_cpu}
        # Else sums are moved to the end of the graph, where they are used, and all that they need is held until then.
        options["reorder_for_locality"] = False
        # Else all layers' scaled gradients would be made by one kernel, and lie there at the same time.
        return options if on_cpu else {**options, "max_fusion_size": 8}

    def say(self, reason: str, *, what: str = "not compiled, runs eager") -> None:
        """Warn that a step is slower than it was asked to be, once for each reason."""
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"{what}: {reason}", stacklevel=_levels_out())


def _levels_out() -> int:
    """How far up the caller of qclip is, for a warning."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("qclip."):
        frame, levels = frame.f_back, levels + 1
    return levels


def _modules(root: nn.Module) -> list[nn.Module]:
    """All modules, each once: at every step, so without the names that torch's own walk makes."""
    found, seen = [root], {root}
    for module in found:  # which grows
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _padded(batch: Any, keep: Tensor, slots: int) -> tuple[Any, Tensor]:
    """The batch with its first example repeated up to ``slots``, and which of them count."""
    count = len(keep)
    if count == slots:
        return batch, keep
    index = torch.arange(slots, device=keep.device)
    real = index < count
    index = torch.where(real, index, 0)
    return batches.select(batch, index, count), keep[index] & real


def _obstacle(plan: Plan, *, routes: bool) -> str | None:
    """Why a plan cannot be carried out by one graph."""
    if routes:
        return "data decide which rows of the batch go where, so ownership is proven at every step"
    if not plan.proven:
        return UNPROVEN
    if plan.whole:
        return f"gradients of the whole model, example by example, are needed for {plan.why}"
    return None


def _in_words(error: Exception) -> str:
    inner = getattr(error, "inner_exception", error)  # of torch's compilers
    if "DataDependent" in type(inner).__name__:
        return "Python code of the model looks at values (an if, int() or item() of a tensor)"
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__

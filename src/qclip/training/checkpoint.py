"""Checkpoints of a run.

Guarantees:
    * A file is written whole or not at all, and only its owner can read it.
    * Reading executes nothing: a file holds tensors, numbers, strings and nests of them.
    * A damaged file, a newer version, another run or another model is refused before anything is loaded.
"""

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from qclip import _validate as check
from qclip._files import replacing

FORMAT = "qclip checkpoint"
VERSION = 1
_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size)


def write(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically.

    * The file at ``path`` is the old one or the new one, even after an interruption.
    * Only the owner can read it: it may hold the seed of the noise.
    * Objects other than tensors, numbers, strings and nests of them are refused by name, before anything is written.
    * Numpy scalars become Python numbers.

    Args:
        path: The file to write.
        content: The sections of the checkpoint, by name.

    Raises:
        qclip.Refusal: If a reader would have to execute code to load the content.
    """
    content = {name: _plain(name, value) for name, value in content.items()}
    with replacing(Path(path), secret=True) as file:
        torch.save({"format": FORMAT, "version": VERSION, **content}, file)


def read(path: str | os.PathLike[str], device: torch.device | None = None) -> dict[str, Any]:
    """Read a checkpoint without executing anything in it.

    Args:
        path: The file to read.
        device: The device of its tensors; None for the device that they were saved from.

    Returns:
        The sections of the checkpoint, by name.

    Raises:
        qclip.Refusal: If the file is missing, damaged (by any flipped bit), not a checkpoint, or newer than this
            version.
    """
    path = Path(path)
    if not path.is_file():
        raise check.refuse("path", str(path), "an existing checkpoint", "check the name, or start a new run")
    damaged = "the file is truncated or damaged; take an earlier copy"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch.load does not verify every checksum
        if broken is not None:
            raise check.refuse("path", str(path), f"intact, but {broken} in it is not", damaged)
        content = torch.load(path, map_location=device, weights_only=True)
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
        raise check.refuse("path", str(path), "a whole qclip checkpoint", damaged) from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        remedy = "pass a file of PrivateTraining.save; load other files with torch.load"
        raise check.refuse("path", str(path), "a qclip checkpoint", remedy)
    version = content.pop("version", None)
    if not isinstance(version, int) or version > VERSION:
        remedy = "it was written by a newer qclip; install that one"
        raise check.refuse("checkpoint version", version, f"<= {VERSION}", remedy)
    return content


def _plain(name: str, value: Any) -> Any:
    """Return the value as plain data; refuse, by its place, a value that could not be loaded without executing code."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is OrderedDict:  # the state of a module, with its version as an attribute
        for key, item in value.items():
            _plain(f"{name}[{key!r}]", item)
        return value
    if type(value) is dict:
        return {key: _plain(f"{name}[{key!r}]", item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_plain(f"{name}[{k}]", item) for k, item in enumerate(value))
    remedy = "leave it out of the checkpoint, or convert it to numbers, strings and tensors"
    bound = "plain data, because loading a checkpoint executes nothing"
    raise check.refuse(name, f"a {type(value).__module__}.{type(value).__qualname__}", bound, remedy)


def require_same_run(
    state: Mapping[str, Any], identity: Mapping[str, Any], execution: Mapping[str, Any], steps_done: int
) -> None:
    """Refuse the state of another run, or a state with fewer steps than are done.

    Args:
        state: A `PrivateTraining.state_dict`.
        identity: The settings that must always agree, by name.
        execution: The settings that decide which random numbers an example gets in the forward pass; they must agree
            if the model draws any.
        steps_done: The number of steps of the run that would load the state.

    Raises:
        qclip.Refusal: By the name of the first setting that differs.
    """
    for section in identity:
        name, current, saved = section, identity[section], state.get(section)
        if saved == current:
            continue
        if isinstance(current, dict) and isinstance(saved, dict):
            key = next(key for key in [*current, *saved] if current.get(key) != saved.get(key))
            name, current, saved = f"{section}[{key!r}]", current.get(key), saved.get(key)
        remedy = "make the training with the same arguments, or start a new run"
        raise check.refuse(name, current, f"{saved!r}, as in the checkpoint", remedy)
    for name, value in (state["execution"] or {}).items():
        if execution[name] != value:
            remedy = (
                "pass the same value, because the model draws random numbers: with others, the steps since the "
                "checkpoint would be released again with the same noise, which could then be subtracted; or start a "
                "new run"
            )
            raise check.refuse(name, execution[name], f"{value!r}, as in the checkpoint", remedy)
    if len(state["history"]) < steps_done:
        remedy = "make a new training to go back: this one would forget the later steps, but not their cost"
        raise check.refuse("steps of the state", len(state["history"]), f">= {steps_done}, the steps done", remedy)


def require_same_tensors(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse the state of another model before any of it is loaded: half a state would ruin the model."""
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if isinstance(x, torch.Tensor)}
    saved = {name: tuple(x.shape) for name, x in state.items() if isinstance(x, torch.Tensor)}
    for name in [*shapes, *saved]:
        if shapes.get(name) != saved.get(name):
            remedy = "build the model as it was when the checkpoint was written"
            raise check.refuse(f"shape of {name}", shapes.get(name), f"{saved.get(name)}, as in the file", remedy)


def optimizer_states(
    optimizers: Sequence[Optimizer], state: Callable[[Optimizer], dict[str, Any]], *, is_read: bool
) -> list[dict[str, Any]]:
    """Return the state of each optimizer, with the name of its class.

    Args:
        optimizers: The optimizers.
        state: Returns the state of one.
        is_read: Whether the result is read on this rank. The states of a ZeroRedundancyOptimizer, of which every rank
            has a part, are sent to rank 0 alone.
    """
    states = []
    for optimizer in optimizers:
        consolidate = getattr(optimizer, "consolidate_state_dict", None)
        if consolidate is not None:
            consolidate(to=0)
        content = state(optimizer) if consolidate is None or is_read else {}
        states.append({"class": type(optimizer).__name__, "state": content})
    return states


def require_same_optimizers(optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse optimizer states of other classes, or with other numbers of parameters in a group."""
    current = [_class_and_sizes(optimizer) for optimizer in optimizers]
    expected = [(state["class"], _sizes(state["state"]["param_groups"])) for state in saved]
    if current != expected:
        remedy = "make the training with the same optimizers, over the same groups of parameters"
        raise check.refuse("optimizers", current, f"{expected}, as in the file", remedy)


def _class_and_sizes(optimizer: Optimizer) -> tuple[str, list[int]]:
    return type(optimizer).__name__, _sizes(optimizer.param_groups)


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def sampled(settings: Mapping[str, Any], num_steps: int) -> dict[str, list[Any]]:
    """Return a few values of every schedule among the settings, to compare runs by: functions cannot be compared."""
    last = num_steps - 1
    steps = sorted({0, last // 3, 2 * last // 3, last})
    return {name: [float(value(t)) for t in steps] for name, value in settings.items() if callable(value)}


def seed_state(seed: np.random.SeedSequence) -> dict[str, Any]:
    """Return a seed as plain data."""
    return {"entropy": seed.entropy, "spawn_key": tuple(seed.spawn_key)}


def seed_of(state: Mapping[str, Any]) -> np.random.SeedSequence:
    """Return the seed of a `seed_state`."""
    return np.random.SeedSequence(state["entropy"], spawn_key=state["spawn_key"])

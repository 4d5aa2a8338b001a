"""Checkpoints: written whole or not at all, read without executing anything, refused where they do not fit."""

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
    """Write a checkpoint atomically: the file at ``path`` is the old one or the new one, whatever happens.

    What a reader would have to execute (objects that are not tensors, numbers, strings, or nests of them) is refused by
    name, before anything is written. Numpy's numbers become Python's.
    """
    content = {name: _plain(name, value) for name, value in content.items()}
    with replacing(Path(path), secret=True) as file:  # it may hold the seed of the noise
        torch.save({"format": FORMAT, "version": VERSION, **content}, file)


def read(path: str | os.PathLike[str], device: torch.device | None = None) -> dict[str, Any]:
    """The content of a checkpoint; nothing in it is executed. Refuses what is not one, or newer than this version."""
    path = Path(path)
    if not path.is_file():
        raise check.refuse("path", str(path), "an existing checkpoint", "check the name, or start a new run")
    damaged = "it is truncated or damaged; take an earlier copy"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # the loader does not look at every checksum
        if broken is not None:
            raise check.refuse("path", str(path), f"intact, but {broken} in it is not", damaged)
        content = torch.load(path, map_location=device, weights_only=True)
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
        raise check.refuse("path", str(path), "a whole qclip checkpoint", damaged) from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        remedy = "pass what PrivateTraining.save wrote; load other files with torch.load"
        raise check.refuse("path", str(path), "a qclip checkpoint", remedy)
    version = content.pop("version", None)
    if not isinstance(version, int) or version > VERSION:
        remedy = "it was written by a newer qclip; install that one"
        raise check.refuse("checkpoint version", version, f"<= {VERSION}", remedy)
    return content


def _plain(name: str, value: Any) -> Any:
    """The value in plain data; what could not be loaded without executing something is refused, by its place."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is OrderedDict:  # a module's state, which carries its version with it
        for key, item in value.items():
            _plain(f"{name}[{key!r}]", item)
        return value
    if type(value) is dict:
        return {key: _plain(f"{name}[{key!r}]", item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_plain(f"{name}[{k}]", item) for k, item in enumerate(value))
    remedy = "leave it out of what is saved, or turn it into numbers, strings and tensors"
    bound = "plain data: loading a checkpoint executes nothing"
    raise check.refuse(name, f"a {type(value).__module__}.{type(value).__qualname__}", bound, remedy)


def require_same_run(
    state: Mapping[str, Any], identity: Mapping[str, Any], execution: Mapping[str, Any], steps_done: int
) -> None:
    """Refuse the state of another run, or one with fewer steps than are done.

    Args:
        state: What `PrivateTraining.state_dict` returned.
        identity: What must agree in any case, by name.
        execution: What decides which random numbers an example gets in the forward pass; must agree where any are
            drawn.
        steps_done: The steps of the run that would take the state over.
    """
    for part, mine in identity.items():
        if state.get(part) == mine:
            continue
        name, given, value = part, mine, state.get(part)
        if isinstance(mine, dict) and isinstance(value, dict):
            key = next(key for key in [*mine, *value] if mine.get(key) != value.get(key))
            name, given, value = f"{part}[{key!r}]", mine.get(key), value.get(key)
        remedy = "make the training with the same arguments, or start a new run"
        raise check.refuse(name, given, f"{value!r}, as in the checkpoint", remedy)
    for name, value in (state["execution"] or {}).items():
        if execution[name] != value:
            remedy = (
                "give it the same: the model draws random numbers, and with others the steps since the checkpoint "
                "would be released again with the same noise, which could then be subtracted; or start a new run"
            )
            raise check.refuse(name, execution[name], f"{value!r}, as in the checkpoint", remedy)
    if len(state["history"]) < steps_done:
        remedy = "make a new training to go back: the steps done since would be forgotten, but not their cost"
        raise check.refuse("steps of the state", len(state["history"]), f">= {steps_done}, those done", remedy)


def require_same_tensors(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse the state of another model before anything is loaded: a model that has taken half of it is no use."""
    mine = {name: tuple(x.shape) for name, x in model.state_dict().items() if isinstance(x, torch.Tensor)}
    theirs = {name: tuple(x.shape) for name, x in state.items() if isinstance(x, torch.Tensor)}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            remedy = "build the model as it was when the checkpoint was written"
            raise check.refuse(f"shape of {name}", mine.get(name), f"{theirs.get(name)}, as in the file", remedy)


def optimizer_states(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return the state of each optimizer, with the name of its class."""
    return [{"class": type(optimizer).__name__, "state": optimizer.state_dict()} for optimizer in optimizers]


def require_same_optimizers(optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states of other classes, or of other numbers of parameters in a group."""
    mine, theirs = ([_shape(named) for named in states] for states in (optimizer_states(optimizers), saved))
    if mine != theirs:
        remedy = "make the training with the same optimizers, over the same groups of parameters"
        raise check.refuse("optimizers", mine, f"{theirs}, as in the file", remedy)


def _shape(named: Mapping[str, Any]) -> tuple[str, list[int]]:
    return named["class"], [len(group["params"]) for group in named["state"]["param_groups"]]


def seed_state(seed: np.random.SeedSequence) -> dict[str, Any]:
    """Return a seed as plain data."""
    return {"entropy": seed.entropy, "spawn_key": tuple(seed.spawn_key)}


def seed_of(state: Mapping[str, Any]) -> np.random.SeedSequence:
    """Return the seed that `seed_state` has written."""
    return np.random.SeedSequence(state["entropy"], spawn_key=state["spawn_key"])

"""Trained models of tables, ready to use: one file with weights, encodings, classes and the guarantee."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qclip import _validate as check
from qclip._files import replace_bytes
from qclip._validate import Floats
from qclip.tables import models
from qclip.tables.reader import read
from qclip.tables.schema import Schema
from qclip.tables.table import Table

VERSION: Final = 1
"""Of the file that `Predictor.save` writes."""
FILE: Final = "model.safetensors"
"""The name of the file in the folder of a run."""
_KEY: Final = "qclip"
_CHUNK: Final = 2**15


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained model of a table.

    Guarantees:
        - The file holds weights, the schema and the facts: no seeds, no optimizer state, no examples.
        - Reading it executes nothing: it is a safetensors file, whose metadata are JSON.

    Args:
        model: The model, which takes the inputs of the schema.
        schema: What the columns became.
        architecture: The kind of model.
        facts: What else a user should know, as plain JSON data: epsilon, delta, the unit of privacy, scores, versions.
    """

    model: nn.Module
    schema: Schema
    architecture: models.Kind
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the probabilities; None where a number is predicted."""
        return self.schema.classes

    def predict(self, table: Any) -> NDArray[Any]:
        """Return the predicted class of each row, by name, or the predicted number; [rows].

        Args:
            table: A `qclip.tables.Table`, a data frame, a mapping from names to columns, or the path of a file.
        """
        outputs = self._outputs(table)
        if self.classes is not None:
            return np.array(self.classes, dtype=object)[outputs.argmax(1).numpy()]
        interval = self.schema.interval
        assert interval is not None
        scaled = outputs[:, 0].double().clamp(-1, 1).numpy()
        return interval.low + (scaled + 1) / 2 * (interval.high - interval.low)

    def predict_proba(self, table: Any) -> Floats:
        """Return the probability of each class for each row, [rows, classes], in the order of `classes`."""
        if self.classes is None:
            raise check.Refusal(f"{self.schema.target!r} is a number, which has no classes; call predict instead")
        return self._outputs(table).double().softmax(1).numpy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which is replaced atomically."""
        from safetensors.torch import save

        weights = {name: x.detach().to("cpu").contiguous() for name, x in self.model.state_dict().items()}
        about = {
            "version": VERSION,
            "architecture": self.architecture,
            "schema": self.schema.to_dict(),
            "facts": dict(self.facts),
        }
        replace_bytes(Path(path), save(weights, {_KEY: json.dumps(about, allow_nan=False)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a model from its file, or from the folder of the run that made it.

        Raises:
            qclip.Refusal: There is no such file, it is damaged, or a newer version of qclip wrote it.
        """
        file = Path(path)
        file = file / FILE if file.is_dir() else file
        about, weights = _read(file)
        if about.get("version") != VERSION:
            remedy = "use the version of qclip that wrote it"
            raise check.refuse(f"version of {file}", about.get("version"), f"{VERSION}, which this qclip reads", remedy)
        try:
            schema, kind = Schema.from_dict(about["schema"]), about["architecture"]
            model = models.build(kind, schema.width, schema.outputs)
            model.load_state_dict(weights)
            facts = about["facts"]
        except (KeyError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise check.Refusal(f"{file} is damaged ({reason}); take another copy, or train again") from None
        return cls(model.eval(), schema, kind, facts)

    def _outputs(self, table: Any) -> Tensor:
        """Return the outputs of the model for each row, [rows, outputs], on the CPU."""
        device = next(self.model.parameters()).device
        with torch.no_grad():
            blocks = [self.model(block.to(device)).cpu() for block in self.schema.blocks(as_table(table))]
        return torch.cat(blocks)


def load(path: str | os.PathLike[str]) -> Predictor:
    """Return the model that a run of ``qclip train`` on a table has made, ready to predict.

    Args:
        path: The folder of the run, or its model.safetensors, wherever it is now.

    Raises:
        qclip.Refusal: There is no model of a table, or its file is damaged.
    """
    return Predictor.load(path)


def as_table(given: Any) -> Table:
    """Return a table as it is, and read others: a file, a data frame, or a mapping from names to columns."""
    if isinstance(given, Table):
        return given
    return read(given) if isinstance(given, str | Path) else Table.of_frame(given)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a file says of its model, and the weights."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        remedy = "name the folder of a run of `qclip train` on a table, or its model.safetensors"
        raise check.refuse("path", str(file), "a file that exists", remedy)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise check.Refusal(f"{file} is not a whole safetensors file ({error}); take another copy") from None
    try:
        about = json.loads(metadata[_KEY])
    except (KeyError, ValueError):
        about = None
    if not isinstance(about, dict):
        raise check.Refusal(
            f"{file} does not say how rows become inputs: it is not the model of a table. Weights alone are read by "
            "safetensors.torch.load_file"
        )
    return about, weights

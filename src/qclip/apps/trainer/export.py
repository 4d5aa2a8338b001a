"""The exported model of a run: one file, without secrets."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import qclip
from qclip._files import replace_bytes
from qclip.apps.trainer.run import TrainerRun
from qclip.tables.predictor import Predictor


def export(run: TrainerRun) -> None:
    """Write the model of a run to its folder: for a table ready to predict, for other data its weights."""
    schema, file = run.task.schema, run.folder.model_file
    if schema is not None:
        Predictor(run.model, schema, run.task.architecture, _facts(run)).save(file)
        return
    from safetensors.torch import save

    weights = {name: x.detach().to("cpu").contiguous() for name, x in run.model.state_dict().items()}
    replace_bytes(file, save(weights, {"facts": json.dumps(_facts(run))}))


def _facts(run: TrainerRun) -> dict[str, Any]:
    """Return what a user of the model should know of its training; released, public and held-out values only."""
    training, plan = run.training, run.training.plan
    epsilon = training.epsilon()
    return {
        "task": run.task.name,
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": plan.delta,
        "unit": run.task.unit,
        "steps": len(training.history),
        "num_steps": training.num_steps,
        "held_out": run.held_out,
        "qclip": qclip.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }

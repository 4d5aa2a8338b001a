"""Folders of runs, made by hand for tests."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from qclip.apps.run_folder import RunFolder
from qclip.apps.run_summary import Summary


def made_run(
    path: Path,
    *,
    steps: int = 40,
    groups: tuple[str, ...] = ("flat",),
    asked: bool = True,
    private: bool = True,
    metrics: tuple[str, ...] = ("accuracy", "loss"),
    threshold: dict[str, Any] | None = None,
    costs: dict[str, list[float]] | None = None,
    lost_from: int | None = None,
    **summary: Any,
) -> Path:
    """A run of 10 steps an epoch whose thresholds fall from 4 to 1; ``summary`` overrides what stands there.

    Without ``costs`` (noise_power and clipped_length of every step) the folder is an older one.
    """
    folder = RunFolder(path)
    folder.prepare()
    folder.metrics_file.touch()
    for step in range(steps):
        epsilon = 0.5 * math.sqrt(step + 1) if private else math.inf
        tau = [4 * (1 + index) * 0.25 ** (step / max(steps - 1, 1)) for index in range(len(groups))]
        unclipped = [0.5 + 0.1 * (-1) ** step] * len(groups) if asked else []
        lost = list(groups) if lost_from is not None and step >= lost_from else []
        row = {"step": step, "tau": tau, "noisy_unclipped": unclipped, "step_size": 1.0, "lost": lost}
        folder.append(row | (costs or {}) | {"epsilon": epsilon})
        if step % 10 == 9:
            held_out = dict.fromkeys(metrics, step / 100)
            folder.append({"step": step + 1, "epoch": step // 10 + 1, "held_out": held_out, "epsilon": epsilon})
    last = dict.fromkeys(metrics, (steps - 1) / 100)
    own: dict[str, Any] = {
        "epsilon": 0.5 * math.sqrt(steps) if private else None,
        "private": private,
        "accuracy": last.get("accuracy"),
        "held_out": last,
        "steps": steps,
        "num_steps": steps,
        "noise_multiplier": 2.0 if private else 0.0,
        "gradient_noise_multiplier": 2.02 if private else 0.0,
        "groups": list(groups),
        "settings": {"epochs": steps // 10, "epsilon": 4.0 if private else None, "lr": 2.0},
    }
    if threshold is not None:
        own["threshold"] = threshold
    folder.write_summary(made_summary(**own | summary))
    return path


def made_summary(**changes: Any) -> Summary:
    """The summary of a finished run, but for the changes."""
    return replace(
        Summary(
            epsilon=3.0,
            delta=1e-5,
            private=True,
            accuracy=0.39,
            held_out={"accuracy": 0.39},
            evaluation=None,
            finished=True,
            steps=40,
            num_steps=40,
            seconds=1.5,
            task="digits",
            description="small <images> & labels",
            unit="any one example",
            public=["the number of rows"],
            details=[],
            examples=1000,
            batch_size=100,
            sampling="poisson",
            sample_rate=0.1,
            accountant="pld",
            noise_multiplier=2.0,
            gradient_noise_multiplier=2.02,
            threshold={"name": "PrivateQuantile", "p": 0.5},
            lost_threshold="",
            groups=["flat"],
            parameters=4810,
            settings={"epochs": 4, "epsilon": 4.0, "lr": 2.0},
            seeded=False,
            command="qclip train --epsilon 4",
            versions={"qclip": "0.1.0"},
            date="2026-01-02T03:04:05+00:00",
            certificate=None,
            certificate_refused=None,
        ),
        **changes,
    )


def rewrite_line(path: Path, number: int, text: str) -> None:
    """Replace a line of the metrics, counted from 0."""
    file = RunFolder(path).metrics_file
    lines = file.read_text().splitlines()
    lines[number] = text
    file.write_text("\n".join(lines) + "\n")


def line(**values: Any) -> str:
    """A line of the metrics."""
    return json.dumps(values)

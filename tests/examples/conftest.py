"""The examples are scripts, not a package: they are loaded from their files."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from qclip import accounting

EXAMPLES = Path(__file__).parents[2] / "examples"
calibrated = functools.cache(accounting.noise_multiplier)


@pytest.fixture(autouse=True)
def _calibrate_once(monkeypatch):
    """Runs with the same plan have the same noise; looking for it takes longer than they do."""
    monkeypatch.setattr(accounting, "noise_multiplier", calibrated)


@pytest.fixture
def example(monkeypatch):
    """``example("cnn_loop")`` is the module of that file."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load

"""What the light modules import (never torch or matplotlib), and what works without the command line's packages."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qclip

WATCHED_IMPORT = """
import sys

class Watch:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        self.asked.add(name.partition(".")[0])

sys.meta_path.insert(0, Watch())
import {module}
print(*Watch.asked)
"""


def asked_for_by(module: str) -> set[str]:
    """The top-level packages that a fresh interpreter looks for when it imports the module."""
    code = WATCHED_IMPORT.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("module", "needed", "others"),
    [
        ("qclip", "qclip", set()),
        ("qclip.theory", "scipy", {"numba", "dp_accounting"}),
        ("qclip.accounting", "dp_accounting", set()),
        ("qclip.schedules", "scipy", {"numba", "dp_accounting"}),
        ("qclip.simulation.problems", "scipy", set()),
        ("qclip.simulation.simulate", "scipy", set()),
    ],
)
def test_imports_stay_light(module, needed, others):
    asked = asked_for_by(module)
    assert needed in asked
    assert asked.isdisjoint({"torch", "matplotlib"} | others)


WITHOUT_COMMAND_LINE = """
import sys
sys.modules.update(rich=None, tyro=None)
"""

ONE_STEP = """
import sys
import torch
import qclip
model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
training = qclip.make_private(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=torch.nn.MSELoss(),
    batch_size=16, steps=2, noise_multiplier=1.0, delta=1e-3,
)
for batch in training.loader:
    training.step(*batch)
print(len(training.history), "qclip.training.process_group" in sys.modules)  # not for one process
"""


def run_without_command_line(code):
    command = [sys.executable, "-c", WITHOUT_COMMAND_LINE + code]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_training_does_not_need_the_packages_of_the_command_line():
    done = run_without_command_line(ONE_STEP)
    assert (done.returncode, done.stdout.strip()) == (0, "2 False"), done.stderr


def test_one_module_imports_torch_distributed():
    source = Path(qclip.__file__).parent
    importing = re.compile(
        r"^\s*(import torch\.distributed|from torch\.distributed|from torch import distributed)", re.M
    )
    found = [path for path in source.rglob("*.py") if importing.search(path.read_text(encoding="utf-8"))]
    assert [path.relative_to(source).as_posix() for path in found] == ["training/process_group.py"]


def test_one_module_imports_flower():
    """The audits of Flower's own faults import it only when they run."""
    source = Path(qclip.__file__).parent
    found = {path for path in source.rglob("*.py") if re.search(r"^\s*(import|from) flwr", path.read_text(), re.M)}
    assert {path.relative_to(source).as_posix() for path in found} == {
        "integrations/flower.py",
        "apps/audits/installed.py",
    }
    assert not re.search(r"^(import|from) flwr", (source / "apps/audits/installed.py").read_text(), re.M)


def test_without_flower_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "qclip.integrations.flower", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'qclip\[flower\]'"):
        importlib.import_module("qclip.integrations.flower")


def test_without_trl_the_error_says_what_to_install(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "qclip.integrations.trl", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'qclip\[trl\]'"):
        importlib.import_module("qclip.integrations.trl")


def test_the_command_says_in_one_sentence_what_to_install():
    done = run_without_command_line("from qclip.apps.cli import main; sys.exit(main(['train']))")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: tyro is not installed; pip install 'qclip[cli]'"]

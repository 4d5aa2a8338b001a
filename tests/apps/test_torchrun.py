"""`torchrun -m qclip train`: one screen, one folder, and the run of a single process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from qclip.apps.cli import main
from qclip.apps.run_folder import RunFolder

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "qclip", "train"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def steps(folder):
    return [line["tau"][0] for line in RunFolder(folder).steps()]


def run(*options):
    return subprocess.run([*TORCHRUN, *map(str, options)], env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", "--out", str(folder), "--epochs", "5", "--seed", "1"]) == 0
    return folder


def test_two_processes_make_the_run_of_one(alone, tmp_path):
    done = run("--out", tmp_path / "run", "--epochs", 5, "--seed", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 5/5") == 1  # one screen
    assert steps(tmp_path / "run") == pytest.approx(steps(alone), rel=1e-6)
    one, two = (json.loads((folder / "summary.json").read_text()) for folder in (alone, tmp_path / "run"))
    assert two["held_out"] == pytest.approx(one["held_out"], rel=1e-4)
    assert (tmp_path / "run" / "report.html").exists()


def test_ctrl_c_stops_all_at_one_step_and_another_number_resumes(alone, tmp_path):
    folder = RunFolder(tmp_path / "run")
    options = ["--out", str(folder.path), "--epochs", "5", "--seed", "1", "--physical-batch-size", "2"]  # slow steps
    with subprocess.Popen(
        [*TORCHRUN, *options], env=ENVIRONMENT, start_new_session=True, stderr=subprocess.PIPE
    ) as ran:
        deadline = time.monotonic() + 200
        while not folder.metrics_file.exists() or len(folder.steps()) < 3:
            assert time.monotonic() < deadline
            assert ran.poll() is None, ran.stderr.read().decode()
            time.sleep(0.05)
        os.killpg(ran.pid, signal.SIGINT)  # as a terminal does
        _, said = ran.communicate(timeout=60)
    assert said.decode().count("finishing this step") == 1  # one screen
    saved = folder.summary()
    assert not saved.finished
    assert 3 <= saved.steps == len(folder.steps()) < 30
    assert main(["train", "--resume", "--out", str(folder.path)]) == 0
    assert steps(folder.path) == pytest.approx(steps(alone), rel=1e-6)

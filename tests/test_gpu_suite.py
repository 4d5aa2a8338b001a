"""The tests for a GPU, rehearsed on the CPU so that they do not rot: among the slow tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ABSENT = ("accelerate", "dp_accounting", "hypothesis", "peft", "rich", "tyro", "xdist")
"""What a machine with a GPU need not have."""
RUN = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(*arguments, path="tests/gpu", code=RUN, timeout=300, **environment):
    """What pytest prints, as `make test-gpu` calls it."""
    options = (path, "-m", "gpu", "--confcutdir=tests/gpu", "-p", "no:cacheprovider", "-rs", *arguments)
    done = subprocess.run(
        [sys.executable, "-c", code, *options],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"} | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def passed(output):
    return int(re.search(r"(\d+) passed", output)[1])


@pytest.mark.slow
def test_a_rehearsal_needs_little_more_than_torch(tmp_path):
    """And says which tests were left out for want of what, and writes the log that it is asked for."""
    log = tmp_path / "log"
    sample = "test_sums_are_close or test_the_same_seed or test_equals_the_oracle and linear-2d or test_training"
    output = run("-k", sample, QCLIP_TEST_DEVICE="cpu", QCLIP_TEST_LOG=str(log))
    assert passed(output) >= 8
    assert "could not import 'dp_accounting'" in output
    assert len(log.read_text().splitlines()) >= 8
    assert "passed" in log.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_they_are_skipped_by_name():
    output = run(path="tests/gpu/test_proofs.py", QCLIP_TEST_DEVICE="cuda")
    assert "torch finds no CUDA device" in output
    assert " passed" not in output


@pytest.mark.slow
def test_a_full_rehearsal():
    """With everything that is installed here."""
    output = run(code="import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", timeout=1800, QCLIP_TEST_DEVICE="cpu")
    assert passed(output) > 900
    reasons = re.findall(r"^SKIPPED \[\d+\] .*?: (.*)$", output, re.MULTILINE)
    assert reasons
    assert all(reason.startswith(("only on a GPU: ", "refused: ")) for reason in reasons)

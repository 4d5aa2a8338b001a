"""The tests of a GPU: `make test-gpu`. They need pytest, numpy, scipy and torch; what needs more is skipped by name.

Results are written to the file QCLIP_TEST_LOG at once, failures in full: pytest itself tells about these at the end,
which a run that is cut off does not reach.
"""

import os
from pathlib import Path

import pytest
import torch

from gpu.device import DEVICE, ON_GPU, missing
from qclip.engine import torch_settings

HERE = Path(__file__).parent
LOG = os.environ.get("QCLIP_TEST_LOG")
ELSEWHERE = pytest.mark.filterwarnings("default", "error:not compiled", "error:not recorded")
"""On a GPU the warnings of torch and the drivers are only listed: they differ from one machine to the next. What qclip
says of a step that is slower than it was asked to be is an error everywhere."""


def pytest_report_header() -> list[str]:
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda}; these tests run on: {DEVICE}"]
    if ON_GPU and missing() is None:
        gpu = torch.cuda.get_device_properties(DEVICE)
        lines.append(f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB")
    return lines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if HERE in item.path.parents:
            if ON_GPU:
                item.add_marker(ELSEWHERE)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if LOG and (report.when == "call" or not report.passed):
        with Path(LOG).open("a") as file:
            file.write(f"{report.outcome} {report.duration:.2f}s {report.nodeid} ({report.when})\n")
            file.write(f"{report.longreprtext}\n" if report.failed else "")


@pytest.fixture(autouse=True)
def _exact_products():
    """Without TF32, which torch allows in convolutions; a test of TF32 asks for it."""
    torch.manual_seed(0)
    with torch_settings.fp32_precision("ieee"):
        yield

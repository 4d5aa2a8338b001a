"""What the light modules import: never torch or matplotlib, whether or not these are installed."""

import subprocess
import sys

import pytest

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

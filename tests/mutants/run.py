"""`make mutants`: plants each fault in a copy of the sources, and runs the tests and audits that must notice it.

    PYTHONPATH=src:tests python -m mutants.run --page docs/guarantees.md
    PYTHONPATH=src:tests python -m mutants.run --only "hole 3" --only tied

With --only, the other rows of the page stay.

Every named test must pass on the sources as they are, and fail with the fault; replay must find nothing on a sound
training, and something with the fault. A fault that breaks the sources so that they cannot run catches nothing.
"""

import argparse
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from mutants.catalogue import MUTANTS
from mutants.mutant import ROOT, Mutant, copied

BROKEN = re.compile(r"\b(NameError|ImportError|ModuleNotFoundError|SyntaxError|UnboundLocalError|IndentationError)\b")
BEGIN, END = "<!-- mutants: made by `make mutants` -->\n", "<!-- end of mutants -->\n"
TESTS = ROOT / "tests"
NOT_RUN = "**not run**"
PRELOADED = ("torch.utils.data", "torch.distributed.fsdp", "scipy.stats", "dp_accounting.pld", "safetensors")
"""What takes seconds to import, and is the same for all mutants."""


@dataclass(frozen=True)
class Outcome:
    """What noticed a fault, and what did not."""

    mutant: Mutant
    noticed: tuple[str, ...]
    missed: tuple[str, ...]

    @property
    def caught(self) -> bool:
        """Whether all that is named noticed it."""
        return bool(self.noticed) and not self.missed


def main() -> int:
    """Run the mutants, print what caught each, and write the table; the status is 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="part of a name; repeat it for several")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    chosen = [m for all_of in MUTANTS.values() for m in all_of if _is_chosen(m, arguments.only)]
    began = time.monotonic()
    for name in PRELOADED:
        import_module(name)
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    if _pytest(ROOT / "src", tests):
        print("the named tests do not pass on the sources as they are", file=sys.stderr)
        return 2
    print(f"{len(tests)} tests pass on the sources as they are", flush=True)
    outcomes = []
    for mutant in chosen:
        outcome = _outcome(mutant)
        outcomes.append(outcome)
        verdict = "caught  " if outcome.caught else "SURVIVES"
        missed = f"; not by {', '.join(outcome.missed)}" if outcome.missed else ""
        print(f"{verdict} {outcome.mutant.name}: {'; '.join(outcome.noticed)}{missed}", flush=True)
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught, in {time.monotonic() - began:.0f} s")
    if arguments.page:
        head, rest = arguments.page.read_text(encoding="utf-8").split(BEGIN)
        before, tail = rest.split(END)
        found = earlier(before) | {outcome.mutant.name: words(outcome) for outcome in outcomes}
        arguments.page.write_text(head + BEGIN + table(found) + END + tail, encoding="utf-8")
    return caught != len(outcomes)


def table(found: Mapping[str, str]) -> str:
    """Return the table of the page, from the words on each mutant by its name."""
    lines = ["| planted | caught by |", "|---|---|"]
    for heading, mutants in MUTANTS.items():
        lines.append(f"| **{heading}** | |")
        lines += [f"| {mutant.name} | {found.get(mutant.name, NOT_RUN)} |" for mutant in mutants]
    rows = [found.get(mutant.name, NOT_RUN) for mutants in MUTANTS.values() for mutant in mutants]
    caught = sum(not row.startswith("**") for row in rows)
    return "\n".join(["", *lines, "", f"Caught / planted: {caught} / {len(rows)}.", "", ""])


def earlier(text: str) -> dict[str, str]:
    """Return the words on each mutant in a table."""
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {row[0]: row[1] for row in rows if len(row) == 2}


def words(outcome: Outcome) -> str:
    """Return what the page says of a mutant."""
    if not outcome.caught:
        return f"**survives** ({', '.join(outcome.missed)})"
    return ", ".join(f"`{x.partition('::')[2]}`" if "::" in x else x.partition(":")[0] for x in outcome.noticed)


def _is_chosen(mutant: Mutant, only: list[str]) -> bool:
    return not only or any(part in mutant.name for part in only)


def _outcome(mutant: Mutant) -> Outcome:
    """Plant a fault in a copy of the sources of its own, and run what must notice it."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    noticed, missed = [], []
    try:
        mutant.plant(copied(folder))
        for test in mutant.tests:
            (noticed if _pytest(folder / "src", [test]) else missed).append(test)
        for name, scenario in (("replay", mutant.replay), ("white-box audit", mutant.audit and "white box")):
            if scenario:
                found = _audited(folder / "src", scenario)
                (noticed if found.startswith("found") else missed).append(f"{name}: {found}")
    finally:
        shutil.rmtree(folder)
    return Outcome(mutant, tuple(noticed), tuple(missed))


def _pytest(sources: Path, tests: list[str]) -> bool:
    """Return whether a test fails with these sources; raise where it cannot run."""
    arguments = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "--durations=0", *(str(TESTS / test) for test in tests)]
    code, output = _forked(sources, lambda: int(pytest.main(arguments)))
    reasons = "\n".join(line for line in output.splitlines() if line.startswith(("E  ", "FAILED", "ERROR")))
    if code not in (0, 1) or (code == 1 and BROKEN.search(reasons)):
        raise RuntimeError(f"{len(tests)} tests cannot run: {tests[:2]}\n{output[-4000:]}")
    return code == 1


def _audited(sources: Path, scenario: str) -> str:
    """Return what the audit says of a training with these sources."""

    def audit() -> int:
        sys.argv = ["audit.holes", scenario]
        runpy.run_module("audit.holes", run_name="__main__")
        return 0

    code, output = _forked(sources, audit)
    if code:
        raise RuntimeError(f"{scenario!r} cannot be audited:\n{output[-4000:]}")
    return output.strip().splitlines()[-1]


def _forked(sources: Path, function: Callable[[], int]) -> tuple[int, str]:
    """Call a function in a process of its own, which imports qclip from these sources; return its code and output.

    A fork, so that torch is imported once.
    """
    assert "qclip" not in sys.modules
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                os.chdir(ROOT)
                sys.path[:0] = [str(sources), str(TESTS)]
                os.environ |= {"PYTHONPATH": f"{sources}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
                sys.dont_write_bytecode = True
                code = function()
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return os.waitstatus_to_exitcode(status), file.read()


if __name__ == "__main__":
    sys.exit(main())

"""Plants a random sample of small faults, by mutmut, and runs the tests of the module that each is in.

    pip install -c constraints.txt mutmut
    python benchmarks/random_mutants.py --sample 30 --module training/sampling.py

mutmut makes every fault that it knows (another operator, another number, an argument left out ...) of the functions of
a module. Of these a sample is drawn with a fixed seed, without replacement, and the module's own fast tests decide.
The survivors are printed as differences of the source, to be read: a test is missing, or the fault changes nothing.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "accounting.py": ["tests/test_accounting.py", "tests/apps/test_ledger.py"],
    "training/noise.py": ["tests/training/test_noise.py", "tests/training/test_noise_source.py"],
    "training/step.py": ["tests/training/test_step.py", "tests/training/test_answer.py"],
    "training/sampling.py": ["tests/training/test_sampling.py", "tests/training/test_public_size.py"],
    "thresholds/private_quantile.py": ["tests/thresholds/test_private_quantile.py"],
    "thresholds/balanced.py": ["tests/thresholds/test_balanced.py"],
    "engine/gradients/clipping.py": ["tests/engine/test_clipping.py", "tests/engine/test_forms.py",
                                     "tests/engine/test_peers.py", "tests/engine/test_rounding.py"],
}  # fmt: skip
"""Each module's own tests."""
KILLED, SURVIVED, TIMEOUT = {1, 3}, {0}, {24, 36, 152, 255, -24}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", choices=list(TESTS), help="repeat it for several; all if left out")
    parser.add_argument("--sample", type=int, default=30, help="faults of each module")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for module in arguments.module or TESTS:
        _report(module, arguments.sample, arguments.seed)
    return 0


def _report(module: str, sample: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="random-mutants-") as folder:
        here = Path(folder)
        for name in ("src", "tests", "docs", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
        for file in ROOT.glob("*.*"):
            if file.is_file():
                shutil.copy(file, here)
        settings = {
            "source_paths": ["src"],
            "only_mutate": [f"src/qclip/{module}"],
            "also_copy": ["docs", "README.md", "constraints.txt", "CHANGELOG.md", "benchmarks", "examples"],
            "pytest_add_cli_args_test_selection": TESTS[module],
            "pytest_add_cli_args": ["-n0", "-p", "no:cacheprovider", "-x", "-q"],
        }
        text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        with (here / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(f"\n[tool.mutmut]\n{text}\n")
        _mutmut(here, "run", "nothing")  # makes the faults, and runs none
        meta = here / "mutants" / "src" / "qclip" / f"{module}.meta"
        everything = sorted(_codes(meta))
        chosen = sorted(random.Random(seed).sample(everything, min(sample, len(everything))))
        ran = _mutmut(here, "run", "--max-children", "1", *chosen)
        codes = {name: code for name, code in _codes(meta).items() if name in chosen}
        survivors = [name for name in chosen if codes[name] in SURVIVED]
        unknown = [f"{name} ({codes[name]})" for name in chosen if codes[name] not in KILLED | SURVIVED | TIMEOUT]
        caught = len(chosen) - len(survivors) - len(unknown)
        print(
            f"\n{module}: {caught} of {len(chosen)} caught, drawn from {len(everything)} with seed {seed}", flush=True
        )
        if unknown:
            print(f"without a result: {', '.join(unknown)}\n{ran[-1500:]}")
        for name in survivors:
            print(f"survives: {_mutmut(here, 'show', name)}", flush=True)


def _codes(meta: Path) -> dict[str, int | None]:
    return json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]


def _mutmut(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-m", "mutmut", *arguments]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


if __name__ == "__main__":
    sys.exit(main())

"""The numeric suites as other machines would run them: `make test-machines`.

MKL and ATen choose their kernels by the CPU, and each rounds in its own way. These settings make them choose others,
as far as the CPU has them; the last ones change the number of threads and every seed. For each setting one line: what
pytest said, whether some products and functions were rounded otherwise than here, and which test came nearest to its
tolerance.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
SUITES = [
    "engine/test_rows.py",
    "engine/test_compiled.py",
    "engine/test_convolutions.py",
    "engine/test_costs.py",
    "engine/test_derivations.py",
    "engine/test_faults.py",
    "engine/test_forms.py",
    "engine/test_precision.py",
    "engine/test_products.py",
    "engine/test_rules.py",
    "engine/test_sensitivity.py",
    "engine/test_shapes.py",
    "integrations/test_transformers.py",
    "training/test_noise.py",
    "engine/test_noise_kernel.py",
]
SETTINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "as it is": ({}, []),
    "MKL_CBWR=COMPATIBLE": ({"MKL_CBWR": "COMPATIBLE"}, []),
    "MKL_CBWR=AVX2": ({"MKL_CBWR": "AVX2"}, []),
    "ATEN_CPU_CAPABILITY=default": ({"ATEN_CPU_CAPABILITY": "default"}, []),
    "ATEN_CPU_CAPABILITY=avx2": ({"ATEN_CPU_CAPABILITY": "avx2"}, []),
    "two threads": ({}, ["--threads", "2", "-n", "1"]),
    "seeds 1": ({}, ["--seeds", "1"]),
    "seeds 2": ({}, ["--seeds", "2"]),
    "seeds 3": ({}, ["--seeds", "3"]),
}
ROUNDINGS = """
import hashlib, torch
torch.set_num_threads(1)
torch.manual_seed(0)
a, b = torch.randn(33, 257), torch.randn(257, 65)
shown = a @ b, a.double() @ b.double(), a.exp().sum(1), torch.nn.functional.layer_norm(a, (257,)), a.tanh()
print(*(hashlib.sha256(x.numpy().tobytes()).hexdigest()[:8] for x in shown))
"""


def main() -> int:
    """Run them all, or those that are named; the number that failed."""
    here = roundings({})
    chosen = [name for name in SETTINGS if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    failed = 0
    for name in chosen:
        variables, options = SETTINGS[name]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--margins", "-o", "verbosity_subtests=0"]
        # Compiled code of its own: torch's cache does not tell these settings apart, and cannot compile what it mixes.
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [*command, *options, "--show-capture=no", *(str(TESTS / suite) for suite in SUITES)],
                env=os.environ | variables | {"TORCHINDUCTOR_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
            )
        others = sum(a != b for a, b in zip(roundings(variables), here, strict=True))
        nearest = re.search(r"nearest to their tolerance.*\n(.*)", done.stdout)
        print(
            f"{name}: {done.stdout.rstrip().splitlines()[-1]}; {others} of {len(here)} rounded otherwise; nearest "
            f"{nearest[1] if nearest else 'unknown'}",
            flush=True,
        )
        if done.returncode:
            failed += 1
            print(done.stdout, done.stderr, flush=True)
    return failed


def roundings(variables: dict[str, str]) -> list[str]:
    """Fingerprints of what some functions give with these settings."""
    command = [sys.executable, "-c", ROUNDINGS]
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=True
    ).stdout.split()


if __name__ == "__main__":
    sys.exit(main())

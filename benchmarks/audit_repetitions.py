"""Repeats the audits with other seeds, and says how often a lower bound exceeds its claim.

    python benchmarks/audit_repetitions.py --repetitions 20

The claim is true, so a bound at a confidence of 95 % may exceed it in 1 of 20 repetitions, and one at 99.9 % in 1 of
1000.
"""

import argparse
import logging

import numpy as np

from qclip import audit
from qclip.audit import bounds

CONFIDENCES = (0.95, 0.999)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--runs", type=int, default=1000, help="runs of a canary audit")
    parser.add_argument("--epsilon", type=float, default=4.0)
    arguments = parser.parse_args()
    logging.getLogger("qclip").setLevel(logging.ERROR)
    shown: dict[str, list[list[float]]] = {"canary": [], "one run": []}
    for seed in range(arguments.repetitions):
        many = audit.white_box(epsilon=arguments.epsilon, runs=arguments.runs, seed=seed)
        one = audit.one_run(epsilon=arguments.epsilon, seed=seed)
        scores, guesses = (many.scores_without, many.scores_with), (one.canaries, one.guesses, one.correct)
        shown["canary"].append([bounds.gaussian(*scores, many.delta, c) for c in CONFIDENCES])
        shown["one run"].append([bounds.one_run_gaussian(*guesses, one.delta, c) for c in CONFIDENCES])
    print(f"{arguments.repetitions} repetitions, claim: epsilon = {arguments.epsilon:g}")
    for name, values in shown.items():
        for confidence, column in zip(CONFIDENCES, np.array(values).T, strict=True):
            over = int((column > arguments.epsilon).sum())
            share = f"median {np.median(column) / arguments.epsilon:.0%}, most {column.max() / arguments.epsilon:.0%}"
            print(f"{name:8} at {confidence:.1%}: {over} above the claim; of it shown: {share}")


if __name__ == "__main__":
    main()

"""Count the functions and files that one private step runs through: python benchmarks/hops.py [SRC] [--compile].

The step is one physical batch of a two-layer perceptron, in the steady state (no proof). A hop is a call from a
function in one file of qclip to a function in another one, with or without library code between them.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("src", nargs="?", default="src", help="folder that holds the package")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(arguments.src).resolve()))
    import torch

    import qclip

    root = str(Path(qclip.__file__).parent)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 20), torch.randint(0, 5, (512,)))
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = qclip.make_private(
        model,
        optimizer,
        data,
        loss=torch.nn.CrossEntropyLoss(),
        batch_size=64,
        steps=100,
        noise_multiplier=1.0,
        delta=1e-5,
        compile=arguments.compile,
        seed=0,
    )
    calls: Counter[str] = Counter()
    functions: set[Any] = set()
    hops = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal hops
        code = frame.f_code
        # Comprehensions and the like are part of the function around them.
        if event != "call" or not code.co_filename.startswith(root) or code.co_name.startswith("<"):
            return
        calls[code.co_filename] += 1
        functions.add(code)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(root):
            caller = caller.f_back
        hops += caller is None or caller.f_code.co_filename != code.co_filename

    batches = iter(training.loader)
    for step in range(41):
        if step == 40:  # proofs are made at the 1st, 2nd, 16th, ... step
            sys.setprofile(profile)
        training.step(*next(batches))
    sys.setprofile(None)
    print(f"{sum(calls.values())} calls, {len(functions)} functions, {len(calls)} files, {hops} hops between files")


if __name__ == "__main__":
    main()

"""The faults of other libraries, run in the libraries themselves where they are installed.

Each function does what a user of that library does, many times, and gives an attacker what the library releases.
Without the library, the rule of the same fault in `qclip.apps.audits.foreign` takes its place, and the row says so.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from qclip._validate import Floats

OTHERS: Final = 32
"""Examples, or clients, beside the canary."""


def available(package: str) -> bool:
    """Return whether a library can be imported."""
    return bool(package) and find_spec(package) is not None


@contextmanager
def quiet(generator: np.random.Generator, package: str) -> Iterator[None]:
    """Seed the global generators that a library draws from, and keep its warnings and logs back."""
    import_module(package)  # which sets the level of its log
    log = logging.getLogger(package)
    level, state = log.level, np.random.get_state()  # noqa: NPY002 - Flower draws from it
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        log.setLevel(logging.CRITICAL)
        torch.manual_seed(int(generator.integers(2**62)))
        np.random.seed(int(generator.integers(2**32)))  # noqa: NPY002
        try:
            yield
        finally:
            log.setLevel(level)
            np.random.set_state(state)  # noqa: NPY002


def ghost_adaptive(z: float) -> Callable[[np.random.Generator, int, bool], Floats]:
    """Return the scores of Opacus' adaptive ghost clipping: the length of the released gradient, over its clip norm."""

    def scores(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
        from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
        from torch.utils.data import DataLoader, TensorDataset

        others = 2 * OTHERS  # Opacus asks for more than 10 z
        size = others + canary
        x = torch.from_numpy(np.random.default_rng(0).standard_normal((others + 1, 4)) / 10).float()[:size]
        if canary:
            x[-1] *= 1e6
        y = torch.zeros(size, dtype=torch.long)
        found = []
        with quiet(generator, "opacus"):
            for _ in range(runs):
                model = nn.Linear(4, 2)
                nn.init.zeros_(model.weight)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                private, stepping, criterion, _ = PrivacyEngineAdaptiveClipping().make_private(
                    module=model,
                    optimizer=optimizer,
                    data_loader=DataLoader(TensorDataset(x, y), batch_size=size),
                    criterion=nn.CrossEntropyLoss(),
                    noise_multiplier=z,
                    max_grad_norm=1.0,
                    grad_sample_mode="ghost",
                    poisson_sampling=False,
                    target_unclipped_quantile=0.5,
                    min_clipbound=0.1,
                    max_clipbound=10.0,
                    clipbound_learning_rate=0.2,
                )
                stepping.zero_grad()
                criterion(private(x), y).backward()
                stepping.step()
                length = torch.cat([grad.flatten() for p in model.parameters() if (grad := p.grad) is not None]).norm()
                found.append(size * float(length) / float(private.max_grad_norm))
        return np.array(found)

    return scores


def realised_size(z: float) -> Callable[[np.random.Generator, int, bool], Floats]:
    """Return the scores of Opacus' adaptive optimizer: how little the threshold falls.

    Nobody but the canary is clipped. Dividing by the size that was drawn makes the noisy count move by one example,
    where the centred count that is charged for moves by a half. The noise is put almost wholly on the count.
    """

    def scores(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
        from opacus.optimizers.adaclipoptimizer import AdaClipDPOptimizer

        grads = torch.full((OTHERS + canary, 1), 0.5)
        if canary:
            grads[-1] = 100.0
        found = []
        with quiet(generator, "opacus"):
            for _ in range(runs):
                parameter: Any = nn.Parameter(torch.zeros(1))
                optimizer = AdaClipDPOptimizer(
                    torch.optim.SGD([parameter], lr=0.0),
                    noise_multiplier=z,
                    unclipped_num_std=0.501 * z,
                    target_unclipped_quantile=0.5,
                    clipbound_learning_rate=0.2,
                    max_clipbound=1e6,
                    min_clipbound=1e-6,
                    max_grad_norm=1.0,
                    expected_batch_size=OTHERS,
                )
                parameter.grad_sample = grads.clone()  # the optimizer marks it as used
                optimizer.step()
                found.append(float(optimizer.max_grad_norm))
        return np.array(found)

    return scores


def _reply(*update: float, **metrics: float) -> Any:
    from flwr.app import ArrayRecord, Message, Metadata, MetricRecord, RecordDict

    arrays, values = ArrayRecord([np.array(update)]), MetricRecord({"num-examples": 1.0} | metrics)
    sent = Metadata(1, "", 1, 0, "", "", 0.0, 60.0, "train")
    return Message(content=RecordDict({"arrays": arrays, "metrics": values}), metadata=sent)


def _flower(side: str, **settings: Any) -> Any:
    from flwr.app import ArrayRecord
    from flwr.serverapp import strategy

    wrapper = getattr(strategy, f"DifferentialPrivacy{side}SideAdaptiveClipping")
    made = wrapper(strategy.FedAvg(), initial_clipping_norm=1.0, **settings)
    made.current_arrays = ArrayRecord([np.zeros(2)])
    return made


def inverted_sign(generator: np.random.Generator) -> tuple[bool, str]:
    """Return whether Flower's threshold runs away from the median of the clients' norms, which is 1."""
    seen = []
    with quiet(generator, "flwr"):
        for start in (0.5, 2.0):
            server = _flower("Server", noise_multiplier=1.0, num_sampled_clients=OTHERS)
            server.clipping_norm = start
            for number in range(1, 41):
                norms = np.exp(0.5 * generator.standard_normal(OTHERS))
                server.aggregate_train(number, [_reply(norm, 0.0) for norm in norms])
            seen.append(server.clipping_norm)
    lost = all(not 0.8 < threshold < 1.25 for threshold in seen)
    return lost, f"from 0.5 and 2, thresholds of {seen[0]:.2g} and {seen[1]:.2g} after 40 rounds; the median is 1"


def next_threshold(z: float) -> Callable[[np.random.Generator, int, bool], Floats]:
    """Return the scores of Flower's server: the canary's own coordinate of the released mean.

    All updates are clipped at 1, and the noise is for the threshold after its update, which is smaller: by a factor of
    about 2.7 with a learning rate of 2.
    """

    def scores(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
        found = []
        with quiet(generator, "flwr"):
            settings = {"num_sampled_clients": OTHERS, "clip_norm_lr": 2.0, "clipped_count_stddev": z}
            server = _flower("Server", noise_multiplier=z, **settings)
            for _ in range(runs):
                server.clipping_norm = 1.0
                replies = [*[_reply(0.0, 5.0) for _ in range(OTHERS)], *([_reply(5.0, 0.0)] if canary else [])]
                arrays, _ = server.aggregate_train(1, replies)
                (mean,) = arrays.to_numpy_ndarrays()
                found.append(float(mean[0]))
        return np.array(found)

    return scores


def exact_fraction(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """Return the clipped fraction among the metrics that Flower's server returns beside the noisy mean."""
    found = []
    with quiet(generator, "flwr"):
        for _ in range(runs):
            server = _flower("Client", noise_multiplier=1.0, num_sampled_clients=OTHERS)
            replies = [
                *[_reply(0.1, 0.0, norm_bit=0.0) for _ in range(OTHERS)],
                *([_reply(1.0, 0.0, norm_bit=1.0)] * canary),
            ]
            _, metrics = server.aggregate_train(1, replies)
            found.append(float(metrics["norm_bit"]))
    return np.array(found)

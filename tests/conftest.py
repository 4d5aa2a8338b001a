"""What all tests share: one hypothesis profile, one thread, seeds that can be changed, margins that can be shown."""

from dataclasses import replace

import pytest
import torch
from hypothesis import core, settings

import margins
from qclip.training import noise


def pytest_addoption(parser):
    margins.add_option(parser)
    parser.addoption(
        "--seeds",
        type=int,
        default=0,
        metavar="SET",
        help="another set of seeds, 1, 2, ...: for numeric suites, whose tests must pass with any",
    )
    parser.addoption("--thorough", action="store_true", help="ten times as many examples of hypothesis")
    parser.addoption("--threads", type=int, default=1, help="threads of torch")


def pytest_configure(config):
    """The same examples each time, without time limits; ``--seeds`` moves all seeds."""
    seeds = config.getoption("--seeds")
    examples = 200 if config.getoption("--thorough") else 20
    settings.register_profile("qclip", derandomize=not seeds, deadline=None, max_examples=examples, print_blob=True)
    settings.load_profile("qclip")
    torch.set_num_threads(config.getoption("--threads"))
    if seeds:
        core.global_force_seed = seeds
        given = torch.manual_seed
        torch.manual_seed = lambda seed: given(seed + 1_000_003 * seeds)
    margins.watch(config)


class Recorder:
    """Stands where the mechanism is: keeps each raw sum and its noise, and can replay what an earlier run released."""

    def __init__(self, replay=None):
        self.values, self.stds, self.released = [], [], []
        self._replay = None if replay is None else iter(replay)
        self._release = noise.release

    def __call__(self, value, noise_multiplier, generator, **options):
        raw = {key: tensor.clone() for key, tensor in value.tensors.items()}
        self.values.append(replace(value, tensors=raw))
        self.stds.append(noise.noise_stds(value, noise_multiplier))
        fresh = self._replay is None
        noisy = self._release(value, noise_multiplier, generator, **options) if fresh else next(self._replay)
        self.released.append(replace(noisy, tensors={key: tensor.clone() for key, tensor in noisy.tensors.items()}))
        return noisy


@pytest.fixture
def make_recorder(monkeypatch):
    """A function that puts a new recorder where the mechanism is."""

    def make(replay=None):
        monkeypatch.undo()
        found = Recorder(replay)
        monkeypatch.setattr(noise, "release", found)
        return found

    return make


@pytest.fixture
def recorder(make_recorder):
    return make_recorder()

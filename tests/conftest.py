"""One hypothesis profile for every test: the same examples each time, no time limits. One thread: tensors are small."""

from dataclasses import replace

import pytest
import torch
from hypothesis import settings

from qclip import mechanism

torch.set_num_threads(1)
settings.register_profile("qclip", derandomize=True, deadline=None, max_examples=60, print_blob=True)
settings.load_profile("qclip")


class Recorder:
    """Stands where the mechanism is: keeps each raw sum and its noise, and can replay what an earlier run released."""

    def __init__(self, replay=None):
        self.values, self.stds, self.released = [], [], []
        self._replay = None if replay is None else iter(replay)
        self._release = mechanism.release

    def __call__(self, value, noise_multiplier, generator, **options):
        raw = {name: tensor.clone() for name, tensor in value.tensors.items()}
        self.values.append(replace(value, tensors=raw))
        self.stds.append(mechanism.noise_stds(value, noise_multiplier))
        fresh = self._replay is None
        noisy = self._release(value, noise_multiplier, generator, **options) if fresh else next(self._replay)
        self.released.append({name: tensor.clone() for name, tensor in noisy.items()})
        return dict(noisy)


@pytest.fixture
def make_recorder(monkeypatch):
    """A function that puts a new recorder where the mechanism is."""

    def make(replay=None):
        monkeypatch.undo()
        found = Recorder(replay)
        monkeypatch.setattr(mechanism, "release", found)
        return found

    return make


@pytest.fixture
def recorder(make_recorder):
    return make_recorder()

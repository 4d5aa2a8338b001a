"""The states of all generators come back, also from plain data."""

import random

import numpy as np
import pytest
import torch

from qclip.engine.randomness import RandomState

CPU = torch.device("cpu")


def draws():
    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()  # noqa: NPY002


@pytest.mark.parametrize("device", [CPU, None])
def test_replayed_draws_are_the_same_and_the_present_comes_back(device):
    state = RandomState.now(device)
    first, second = draws(), draws()
    with state.replayed():
        assert draws() == first
    assert state.unmoved() is state.python_unmoved() is False
    state.restore()
    assert state.unmoved() is state.python_unmoved() is True
    assert (draws(), draws()) == (first, second)


def test_plain_data_holds_every_state():
    states = RandomState.now().state_dict()
    expected = draws()
    assert isinstance(states["numpy"][1], torch.Tensor)
    RandomState.from_state_dict(states).restore()
    assert draws() == expected

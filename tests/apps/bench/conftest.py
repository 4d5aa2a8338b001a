"""A case small enough for every mode, under its own name among the others."""

from functools import partial

import pytest
from torch import nn

from qclip.apps.bench import cases
from qclip.apps.bench.cases import BenchCase
from qclip.apps.data.models import CausalTransformer


@pytest.fixture
def tiny(monkeypatch):
    case = BenchCase("tiny", partial(nn.Linear, 3, 2), shape=(3,), classes=2, batch=4)
    monkeypatch.setitem(cases.CASES, "tiny", case)
    return case


@pytest.fixture
def tiny_tokens(monkeypatch):
    model = partial(CausalTransformer, 11, 5, width=8, layers=1, heads=2)
    case = BenchCase("tokens", model, shape=(5,), classes=11, batch=3, tokens=True)
    monkeypatch.setitem(cases.CASES, "tokens", case)
    return case

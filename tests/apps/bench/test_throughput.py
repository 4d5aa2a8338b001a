"""Throughput: whole loops, plain and private."""

from itertools import islice

import pytest
import torch
from torch.utils.data import TensorDataset

from qclip.apps.bench import throughput
from qclip.apps.bench.precision import PRECISIONS
from qclip.apps.bench.workload import workload


def test_rows(tiny):
    said = []
    plain, private = throughput.measure_throughput(
        cases=["tiny"], batch_size=8, rounds=1, steps_per_round=2, compiled=False, say=said.append
    )
    assert (plain.mode, plain.ratio, plain.padding, plain.batch_size) == ("plain", 1.0, 1.0, 8)
    assert private.mode == "qclip"
    assert private.ratio == pytest.approx(private.examples_per_second / plain.examples_per_second)
    assert said == ["preparing tiny, plain", "preparing tiny, qclip", "timing tiny"]


def loops(case):
    dataset = TensorDataset(*case.examples(40))
    works = [workload(case, PRECISIONS["float32"], torch.device("cpu")) for _ in range(2)]
    return works, (
        throughput.plain_loop(works[0], dataset, compiled=False),
        throughput.private_loop(works[1], dataset, compiled=False),
    )


def test_both_loops_train(tiny):
    works, (plain, private) = loops(tiny)
    before = [work.model.weight.detach().clone() for work in works]
    assert [taken.examples for taken in islice(plain, 12)] == [4] * 12  # more than one pass over the 40
    drawn = [taken.examples for taken in islice(private, 12)]
    assert len({*drawn}) > 1  # Poisson
    assert all(not torch.equal(work.model.weight, old) for work, old in zip(works, before, strict=True))


def test_refusals():
    with pytest.raises(ValueError, match="case = 'gpt9' must be one of"):
        throughput.measure_throughput(cases=["gpt9"])
    with pytest.raises(ValueError, match="batch_size = 0 must be >= 1"):
        throughput.measure_throughput(batch_size=0)

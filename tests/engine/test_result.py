"""What the engine returns, by itself."""

import pytest
import torch

from qclip.engine import ClippedGradients


def result(group_norms, mask=None):
    group_norms = torch.tensor(group_norms)
    mask = torch.ones(len(group_norms), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return ClippedGradients({}, group_norms.norm(dim=1), group_norms, (1.0,), torch.zeros(len(group_norms)), mask)


def test_counts_the_norms_at_or_under_each_radius():
    found = result([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]])
    assert found.count_under([[2.0], [4.0]]).tolist() == [[2], [0]]
    assert found.count_under([[1.0, 2.5], [5.0, 9.0]]).tolist() == [[1, 2], [1, 3]]
    assert found.count_under([[2.0], [4.0]]).dtype == torch.int64


@pytest.mark.parametrize("radius", [10.0, torch.inf])
def test_masked_examples_are_not_counted(radius):
    assert result([[0.0], [1.0]], [False, True]).count_under([[radius]]).tolist() == [[1]]


@pytest.mark.parametrize("radius", [10.0, 3e38, torch.inf])
def test_non_finite_examples_are_not_counted(radius):
    assert result([[torch.inf], [1.0]]).count_under([[radius]]).tolist() == [[1]]


def test_an_empty_batch_counts_zero():
    found = ClippedGradients(
        {}, torch.zeros(0), torch.zeros(0, 2), (1.0, 1.0), torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    )
    assert found.count_under([[1.0], [2.0]]).tolist() == [[0], [0]]

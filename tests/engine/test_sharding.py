"""Whether a computation reads the values of parameters, which sharded parameters have only while they are gathered."""

import pytest
import torch

from qclip._validate import Refusal
from qclip.engine.sharding import Reads


def weight():
    return torch.nn.Parameter(torch.arange(6.0).view(2, 3))


READS = {
    "a product": lambda w: torch.ones(4, 2) @ w,
    "a product with a view": lambda w: torch.ones(4, 3) @ w.t(),
    "a slice": lambda w: w[1] + 1,
    "the data": lambda w: w.data.sum(),
    "a copy": lambda w: w.clone(),
    "a comparison": lambda w: torch.equal(w, torch.zeros(2, 3)),
    "a list": lambda w: torch._foreach_add([torch.zeros(2, 3), w], 1.0),
}
SHAPES = {
    "a shape": lambda w: (w.shape, w.numel(), w.dtype),
    "zeros": lambda w: (torch.zeros_like(w), w.new_zeros(3), torch.empty_like(w)),
    "a view": lambda w: w.view(3, 2)[:, 1].detach(),
    "another tensor": lambda w: torch.ones(3) + 1,
}


@pytest.mark.parametrize("name", READS)
def test_values_that_are_read_are_found(name):
    w = weight()
    reads = Reads([("layer.weight", w)], allowed=True)
    with torch.no_grad(), reads:
        READS[name](w)
    assert reads.found


@pytest.mark.parametrize("name", READS)
def test_values_that_are_not_there_are_refused_by_name(name):
    w = weight()
    reads = Reads([("layer.weight", w)], allowed=False)
    with torch.no_grad(), pytest.raises(Refusal, match=r"'layer\.weight'.*compile=True"), reads:
        READS[name](w)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_may_be_read(name):
    w = weight()
    reads = Reads([("layer.weight", w)], allowed=False)
    with torch.no_grad(), reads:
        SHAPES[name](w)
    assert not reads.found

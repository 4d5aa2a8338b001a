"""The compiled driver on a model and a batch, and how it is watched."""

import torch

from engine.cases import squared
from qclip.engine import Engine
from qclip.engine.compiled.driver import Compiled
from qclip.engine.driver import call


def as_traced(graph, inputs, options):
    """In place of machine code: the traced graph runs as it is, operation by operation."""
    return graph


class Pair:
    """A model with its compiled driver, beside an eager engine of its own."""

    def __init__(self, model, loss=squared, *, slots=None, **options):
        self.model, self.loss = model, loss
        self.driver = Compiled(Engine(model, **options), slots=slots)
        self.eager = Engine(model, **options)

    def evaluate(self, batch):
        """One loss per example."""
        return self.loss(call(self.model, batch[0]), batch[1])

    def compiled(self, inputs, targets, clip_norm=1.0, **options):
        """By the compiled driver."""
        return self.driver.clipped(self.evaluate, (inputs, targets), clip_norm, **options)

    def expected(self, inputs, targets, clip_norm=1.0, **options):
        """By the eager one."""
        return self.eager.clipped(self.evaluate, (inputs, targets), clip_norm, **options)


def batch(count, *shape, seed=0, dtype=torch.float32):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator)
    return x.to(dtype), 2 * torch.randn(count, generator=generator)

"""The private step without a loader: the paper's equations, and where ranks or clients would meet."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip import accounting
from qclip.engine import Engine, oracle
from qclip.thresholds import (
    Constant,
    ExactQuantile,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    SlackQuantile,
)
from qclip.training.make import make_private
from qclip.training.noise import NoiseSource, group_dims
from qclip.training.step import StepRule, StepState, ask, private_step
from qclip.training.sums import Key

B = 20
THRESHOLDS = {
    "constant": Constant(0.3),
    "private quantile": PrivateQuantile(0.5),
    "geometric": GeometricQuantile(0.5),
    "histogram": HistogramQuantile(0.5),
    "slack": SlackQuantile(0.5, initial=1.0),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def examples(count=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator).double(), torch.randn(count, 2, generator=generator).double()


def squared(outputs, targets):
    return (outputs - targets).square().sum(1)


def rule(model, threshold, *, z=1.0, **changes):
    """All parameters in one group."""
    parameters = dict(model.named_parameters())
    members = dict.fromkeys(parameters, 0)
    return StepRule(
        threshold=threshold,
        members={Key("gradient", name): 0 for name in parameters},
        dims=group_dims(parameters, members, 1),
        dtypes={Key("gradient", name): p.dtype for name, p in parameters.items()},
        batch_size=B,
        noise=accounting.split(z, threshold.noise_share),
        **changes,
    )


def clipping(model):
    """One example at a time."""

    def clip(batch, clip_norms):
        x, y = batch
        norms = oracle.clipped_gradients(model, squared, x, y, 1.0).group_norms
        chosen = clip_norms(norms) if callable(clip_norms) else clip_norms
        return oracle.clipped_gradients(model, squared, x, y, list(chosen)), len(x)

    return clip


def halves(count=24, at=10):
    x, y = examples(count)
    return [(x[:at], y[:at]), (x[at:], y[at:])]


def step(model, the_rule, batch, *, seed=0, state=None, **changes):
    state = state or StepState(0, the_rule.threshold.start(1))
    return private_step(state, batch, clip=clipping(model), rule=the_rule, source=NoiseSource(seed), **changes)


def test_it_is_the_equation_of_the_paper():
    """The released gradient is the mean of clipped gradients over the expected batch size, plus noise."""
    model, tau = network(), 0.3
    released = step(model, rule(model, Constant(tau), z=0.0), [examples()])
    x, y = examples()
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for k in range(len(x)):
        grads = torch.autograd.grad(squared(model(x[k : k + 1]), y[k : k + 1]).sum(), list(model.parameters()))
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        for total, grad in zip(expected.values(), grads, strict=True):
            total.add_(min(1.0, tau / norm) * grad / B)
    for name, value in expected.items():
        torch.testing.assert_close(released.noisy_gradient[name], value, rtol=1e-9, atol=1e-12)
    assert released.clip_norms == (tau,)
    assert released.state.step == 1


def test_the_noise_has_the_size_that_is_accounted_for():
    """A second with the same data has other noise; the difference has twice the variance. Fails one seed in 1e6."""
    model, tau, z = network(), 0.3, 2.0
    the_rule = rule(model, Constant(tau), z=z)
    pairs = [
        (step(model, the_rule, [examples()], seed=k), step(model, the_rule, [examples()], seed=k + 100))
        for k in range(40)
    ]
    difference = torch.cat(
        [(a.noisy_gradient[n] - b.noisy_gradient[n]).flatten() for a, b in pairs for n in a.noisy_gradient]
    )
    expected = math.sqrt(2) * z * tau / B
    assert difference.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(difference)))


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_how_a_step_is_cut_does_not_matter(threshold):
    """The same release whether its examples come in one physical batch or in two."""
    model = network()
    the_rule = rule(model, THRESHOLDS[threshold], z=0.5)
    whole, cut = (step(model, the_rule, batch) for batch in ([examples()], halves()))
    for name, value in whole.noisy_gradient.items():
        torch.testing.assert_close(cut.noisy_gradient[name], value, rtol=1e-9, atol=1e-12)
    assert cut.noisy_unclipped == pytest.approx(whole.noisy_unclipped, rel=1e-6)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_ranks_meet_in_reduce(threshold):
    """A rank that holds half of the examples releases the same as one that holds all, once their sums are added."""
    model = network()
    the_rule = rule(model, THRESHOLDS[threshold], z=0.5)
    mine, others = halves()
    theirs = []

    def keep(raw):
        theirs.append(raw)
        return raw

    def add(raw):
        raw += theirs.pop(0)
        return raw

    step(model, the_rule, [others], reduce=keep)
    reduced = step(model, the_rule, [mine], reduce=add)
    whole = step(model, the_rule, [examples()])
    for name, value in whole.noisy_gradient.items():
        torch.testing.assert_close(reduced.noisy_gradient[name], value, rtol=1e-9, atol=1e-12)
    assert reduced.noisy_unclipped == pytest.approx(whole.noisy_unclipped, rel=1e-6)
    assert not theirs


@pytest.mark.parametrize("physical_batch_size", [None, 30])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_run_takes_these_steps(threshold, physical_batch_size):
    """`PrivateTraining` applies what the function releases, and records it."""
    model, x, y = network(), *examples(150)
    settings = {"batch_size": 70, "steps": 3, "noise_multiplier": 0.25, "delta": 1e-3, "seed": 4}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = make_private(
        model, optimizer, TensorDataset(x, y), loss=squared, threshold=THRESHOLDS[threshold],
        physical_batch_size=physical_batch_size, **settings,
    )  # fmt: skip
    twin = network()
    engine = Engine(twin)
    the_rule = replace(rule(twin, THRESHOLDS[threshold], z=0.25), batch_size=70)
    source = NoiseSource(np.random.SeedSequence(4).spawn(2)[1])
    state = StepState(0, the_rule.threshold.start(1))

    def clip(indices, clip_norms):
        losses = lambda batch: squared(twin(batch[0]), batch[1])  # noqa: E731
        return engine.clipped(losses, (x[indices], y[indices]), clip_norms), len(indices)

    batches = iter(training.loader)
    for step in range(3):
        drawn = training.loader.sampler.draw(step)
        width = physical_batch_size or len(drawn)
        cut = [drawn[start : start + width] for start in range(0, len(drawn), width)]
        released = private_step(state, cut, clip=clip, rule=the_rule, source=source)
        state = released.state
        for _ in cut:
            training.step(*next(batches))
        record = training.history[step]
        assert (record.tau, record.noisy_unclipped) == (released.clip_norms, released.noisy_unclipped)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.sub_(0.1 * released.noisy_gradient[name])
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_nothing_is_changed_but_what_is_returned():
    """Pure: the same call gives the same release; the model has no gradients, the state is as it was."""
    model = network()
    the_rule = rule(model, PrivateQuantile(0.5))
    state = StepState(3, the_rule.threshold.start(1))
    before = repr(state)
    first, second = (step(model, the_rule, halves(), state=state) for _ in range(2))
    assert all(torch.equal(first.noisy_gradient[n], second.noisy_gradient[n]) for n in first.noisy_gradient)
    assert first.state == second.state
    assert first.state.step == 4
    assert repr(state) == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("batch", [1, 2], ids=["whole", "cut"])
def test_a_threshold_learns_the_fractions_it_asked_for(batch, rescale):
    """Without noise they are exact, for the paid count and the free one; with it their stated deviations are."""
    answers = []

    class Spy(PrivateQuantile):
        def update(self, state, step, answer):
            answers.append(answer)
            return super().update(state, step, answer)

    model, threshold = network(), Spy(0.5, initial=8.0)
    x, y = examples()
    norms = oracle.clipped_gradients(model, squared, x, y, 1.0).norms
    state = StepState(0, threshold.start(1))
    batches = [(x, y)] if batch == 1 else halves()
    for z in (0.0, 0.5):
        the_rule = rule(model, threshold, z=z, rescale_to_unit_norm=rescale)
        step(model, the_rule, batches, state=state)
    exact, noisy = answers
    query = ask(state, the_rule)
    ((radius,),) = query.question.count.radii
    (inner,) = query.question.slack.radii
    assert 0 < (norms <= inner[0]).sum() < (norms <= radius).sum() < len(x)
    within = [(norms <= r).sum().item() / B for r in inner]
    assert exact.noisy_within[0] == pytest.approx(within, rel=1e-6)
    # Each example adds its indicator less the centre, and the expected batch's centres are added back.
    centre = query.question.count.centre
    expected = ((norms <= radius).sum().item() - centre * len(x)) / B + centre
    assert exact.noisy_bins[0] == pytest.approx([expected], rel=1e-6)
    assert exact.bins_std == 0
    assert exact.within_std == ((0.0,) * len(inner),)
    (coefficients,) = query.coefficients
    (tau,) = query.clip_norms
    stds = [the_rule.noise.gradient * tau / a / B for a in coefficients]
    assert noisy.within_std[0] == pytest.approx(stds, rel=1e-9)
    assert noisy.bins_std == pytest.approx(the_rule.noise.counts * query.question.count.l2_bound / B, rel=1e-9)
    assert noisy.noisy_within != exact.noisy_within


def test_the_dimensions_of_a_sum_are_those_of_the_run_and_of_the_slack():
    """They share the noise among groups, so that every rank must count alike."""
    model = network()
    the_rule = rule(model, SlackQuantile(0.5, initial=1.0))
    query = ask(StepState(0, the_rule.threshold.start(1)), the_rule)
    (row,) = query.coefficients
    assert len(row) > 0
    assert query.dims == (sum(p.numel() for p in model.parameters()) + len(row),)


def test_only_the_gradient_of_parameters_is_for_the_optimizer():
    model = network()
    the_rule = rule(model, SlackQuantile(0.5, initial=1.0))
    assert any(key.kind == "slack" for key in ask(StepState(0, the_rule.threshold.start(1)), the_rule).members)
    assert set(step(model, the_rule, [examples()]).noisy_gradient) == {name for name, _ in model.named_parameters()}


def test_a_rescaled_gradient_is_in_units_of_the_clip_norm():
    model, tau = network(), 0.25
    plain = step(model, rule(model, Constant(tau), z=0.0), [examples()])
    rescaled = step(model, rule(model, Constant(tau), z=0.0, rescale_to_unit_norm=True), [examples()])
    assert (plain.scale, rescaled.scale) == (1.0, tau)
    for name, value in plain.noisy_gradient.items():
        torch.testing.assert_close(rescaled.noisy_gradient[name], value / tau, rtol=1e-9, atol=0)


def test_a_threshold_that_looks_at_the_batch_clips_at_its_quantile():
    model = network()
    released = step(model, rule(model, ExactQuantile(0.5), z=0.0), [examples()])
    x, y = examples()
    norms = oracle.clipped_gradients(model, squared, x, y, 1.0).norms
    assert (norms <= released.clip_norms[0] * (1 + 1e-9)).double().mean().item() == pytest.approx(0.5, abs=1 / len(x))


def test_a_threshold_is_asked_for_the_step_at_hand():
    asked = []

    class Asked(Constant):
        def ask(self, state, step):
            asked.append(step)
            return super().ask(state, step)

    query = ask(StepState(7, 1), rule(network(), Asked(lambda step: 1.0 + step)))
    assert query.clip_norms == (8.0,)
    assert asked == [7]


def test_a_threshold_that_looks_at_the_data_set_is_given_its_norms():
    threshold = ExactQuantile(0.5, over="dataset")
    state = StepState(0, threshold.start(1))
    query = ask(state, rule(network(), threshold, z=0.0), lambda: np.array([[1.0], [2.0], [3.0]]))
    assert query.clip_norms == (2.0,)

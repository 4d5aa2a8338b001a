"""What may be known of a data set's size: all of it, or a number given beforehand and nothing else."""

import math

import numpy as np
import pytest
import torch
from scipy import fft
from scipy.stats import binom, norm
from torch import nn
from torch.utils.data import TensorDataset

from qclip import accounting, theory
from qclip.thresholds import Constant, ExactQuantile, PrivateQuantile
from qclip.training.make import make_private
from qclip.training.sampling import PoissonSampler


def table(size, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def make(dataset, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    settings = {"batch_size": 12, "noise_multiplier": 2.0, "threshold": PrivateQuantile(0.5), "seed": 0} | changes
    if "steps" not in settings:
        settings["epochs"] = 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, dataset, loss=nn.CrossEntropyLoss(), **settings), model


def run(training):
    while not training.finished:
        for batch in training.loader:
            training.step(batch)


def public(training):
    """Every number that a training shows before it has seen an example."""
    numbers = training.num_steps, training.steps_per_epoch, training.noise_multipliers
    curve = [training.epsilon_curve(step) for step in (1, training.num_steps)]
    state = {name: value for name, value in training.state_dict().items() if name != "secrets"}
    return training.plan, numbers, curve, state


@pytest.mark.parametrize("changes", [{}, {"compile": True}, {"noise_multiplier": None, "epsilon": 2.0}])
def test_with_a_public_size_no_number_depends_on_the_length(changes):
    one, other = (public(make(table(size), dataset_size=64, **changes)[0]) for size in (61, 60))
    assert one == other
    assert one[0].sample_rate == 12 / 64
    assert one[0].delta == 1 / 640
    assert one[1][:2] == (12, 6)


def test_without_one_the_length_is_public():
    one, other = (make(table(size))[0].plan for size in (61, 60))
    assert (one.dataset_size, other.dataset_size) == (61, 60)
    assert one.sample_rate < other.sample_rate
    assert one.delta < other.delta
    assert (one.num_steps, other.num_steps) == (12, 10)


def test_an_example_is_removed_by_contributing_nothing():
    """The whole run, bit for bit: the last example is there and adds nothing, or is not there."""
    x, y = table(61).tensors
    x[-1] = math.nan
    found = []
    for size in (61, 60):
        data = TensorDataset(x[:size], y[:size])
        training, model = make(data, dataset_size=64, threshold=Constant(0.5), steps=60, delta=1e-3)
        run(training)
        found.append((nn.utils.parameters_to_vector(model.parameters()), training.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert any(60 in PoissonSampler(61, 12 / 64, training.loader.sampler.seed).draw(step) for step in range(60))


@pytest.mark.parametrize("size", [30, 300])
def test_examples_join_at_the_public_rate_whatever_the_length(size):
    """The mean of 2000 draws is off by more than 4 standard deviations with probability 6e-5 for a seed."""
    training, _ = make(table(size), batch_size=20, dataset_size=100, steps=2000)
    sizes = [len(training.loader.sampler.draw(step)) for step in range(2000)]
    assert abs(np.mean(sizes) - 0.2 * size) < 4 * math.sqrt(0.2 * 0.8 * size / 2000)
    assert max(max(training.loader.sampler.draw(step)) for step in range(200)) == size - 1


def test_sums_are_divided_by_the_batch_size_whatever_the_length(monkeypatch):
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.arange(30))
    moved = []
    for nominal in (1000, 60):
        training, model = make(table(60), noise_multiplier=0, steps=1, threshold=Constant(1.0), dataset_size=nominal)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        run(training)
        moved.append(nn.utils.parameters_to_vector(model.parameters()).detach() - before)
    assert torch.equal(*moved)


@pytest.mark.parametrize("nominal", [20, 100])
def test_a_quantile_over_the_data_set_is_that_of_the_examples_there(nominal):
    taus = []
    for given in (None, nominal):
        threshold = ExactQuantile(0.6, over="dataset")
        training, _ = make(table(60), noise_multiplier=0, steps=1, threshold=threshold, dataset_size=given)
        run(training)
        taus.append(training.history[0].tau)
    assert taus[0] == taus[1]


def test_it_is_part_of_the_plan_and_of_a_checkpoint(tmp_path):
    training, _ = make(table(60), dataset_size=64, delta=1e-3, steps=4)
    training.step(next(iter(training.loader)))
    training.save(tmp_path / "run.pt")
    make(table(60), dataset_size=64, delta=1e-3, steps=4)[0].load(tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"plan\['dataset_size'\] = 60 must be 64, as in the checkpoint"):
        make(table(60), delta=1e-3, steps=4)[0].load(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="dataset has changed since the checkpoint was written"):
        make(table(59), dataset_size=64, delta=1e-3, steps=4)[0].load(tmp_path / "run.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_size": 11}, "batch_size = 12 must be <= dataset_size = 11"),
        ({"dataset_size": 0}, "dataset_size = 0 must be >= 1"),
        ({"dataset_size": 60.5}, "dataset_size = 60.5 must be a whole number"),
        (
            {"dataset_size": 64, "sampling": "uniform", "noise_multiplier": 0},
            r"dataset_size = 64 must be left out with sampling=\"uniform\"",
        ),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(table(60), **changes)


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="dataset is empty: it must have at least one example"):
        make(table(0), dataset_size=64)


def test_a_certificate_needs_the_size_itself():
    """The theorem is about the mean over the examples, which is what the steps follow only there."""
    training, _ = make(table(60), dataset_size=64, steps=4, batch_size=50, threshold=PrivateQuantile(0.5))
    run(training)
    with pytest.raises(ValueError, match=r"dataset_size = 64 must be .* the number of examples"):
        training.certificate(theory.Assumptions(L=1, sigma=1, q=2, gap=1), p_lo=0.1)


# Why it matters


def composed_delta(p, q, steps, epsilon, interval=2e-5):
    """The delta between ``steps`` draws from p and from q (probabilities of cells), by FFT of the privacy loss."""
    seen = (p > 1e-300) & (q > 1e-300)
    p, loss = p[seen], np.log(p[seen] / q[seen])
    size = 2**18
    place = loss / interval
    low = np.floor(place).astype(int)
    one = np.zeros(size)
    # Split between both neighbours, so that means stay; probabilities wrap around at size / 2 cells.
    np.add.at(one, low % size, p * (low + 1 - place))
    np.add.at(one, (low + 1) % size, p * (place - low))
    many = fft.irfft(fft.rfft(one) ** steps, size)
    losses = fft.fftfreq(size, 1 / (size * interval))
    return float(np.sum(np.maximum(many, 0) * np.maximum(-np.expm1(epsilon - losses), 0)))


def one_step(size, rate, z, edges, *, with_target):
    """Cells of one noisy sum: each of ``size`` examples adds 1, and one more, where there is one, adds -1."""
    counts = np.arange(size + 1)
    cells = binom.pmf(counts, size, rate) @ np.diff(norm.cdf((edges - counts[:, None]) / z))
    if not with_target:
        return cells
    shifted = binom.pmf(counts, size, rate) @ np.diff(norm.cdf((edges - counts[:, None] + 1) / z))
    return (1 - rate) * cells + rate * shifted


def pair_delta(size, batch, z, steps, epsilon, *, rate_with_target):
    edges = np.linspace(-12 * z, size + 12 * z, 4001)
    without = one_step(size, batch / size, z, edges, with_target=False)
    target = one_step(size, rate_with_target, z, edges, with_target=True)
    return max(composed_delta(a, b, steps, epsilon) for a, b in ((without, target), (target, without)))


def test_a_size_that_follows_the_data_is_not_covered_and_a_public_one_is():
    """N = 200, B = 20: where one more example lowers everybody's rate, all the others tell of it."""
    size, batch, z, steps, delta = 200, 20, 10.0, 300, 1e-5
    epsilon = accounting.epsilon(noise_multiplier=z, sample_rate=batch / size, steps=steps, delta=delta)
    assert epsilon == pytest.approx(0.628, abs=1e-3)
    followed = pair_delta(size, batch, z, steps, epsilon, rate_with_target=batch / (size + 1))
    assert followed == pytest.approx(3.9e-3, rel=0.02)
    given = pair_delta(size, batch, z, steps, epsilon, rate_with_target=batch / size)
    assert given == pytest.approx(2.6e-6, rel=0.03)
    assert given < delta < followed


def test_the_composition_by_hand_is_right_for_a_gaussian():
    z, steps, epsilon = 60.0, 300, 0.5
    edges = np.linspace(-12 * z, 1 + 12 * z, 4001)
    p, q = (np.diff(norm.cdf((edges - shift) / z)) for shift in (0, 1))
    mu = math.sqrt(steps) / z
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert composed_delta(p, q, steps, epsilon) == pytest.approx(exact, rel=2e-3)

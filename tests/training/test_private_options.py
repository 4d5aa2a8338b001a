"""What make_private offers beside the main line: rows, schedules, uniform sampling, other accountants, certificates."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent, pld, rdp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from qclip import engine, schedules, simulate, theory
from qclip.simulation.problems import Problem
from qclip.thresholds import (
    BalancedThreshold,
    Constant,
    ExactQuantile,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    RollingQuantile,
    SlackQuantile,
)
from qclip.training.make import make_private
from qclip.training.rows import Repeated
from qclip.training.sampling import UniformSampler


def data(size=60, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def linear(seed=0, bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(4, 3, bias=bias)


def make(model=None, dataset=None, optimizer=None, **changes):
    model = model or linear()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    settings = {"batch_size": 12, "steps": 6, "noise_multiplier": 1.0, "delta": 1e-4, "seed": 0} | changes
    if "per_example_loss" not in settings:
        settings.setdefault("loss", nn.CrossEntropyLoss())
    return make_private(model, optimizer, dataset or data(), **settings), model, optimizer


def run(training):
    for batch in training.loader:
        training.step(batch)
    return training


# Rows


class Rows(Dataset):
    """Items of K rows each, in one of the forms that a data set may give them."""

    def __init__(self, form, k=3, size=40):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, k, 4, generator=generator)
        self.y = torch.randint(3, (size, k), generator=generator)
        if form == "shared label":
            self.y = self.y[:, :1].expand(size, k)
        self.form = form

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i, 0] if self.form == "shared label" else self.y[i]


def flat(items):
    xs, ys = zip(*items, strict=True)
    return torch.cat(xs), torch.cat(ys)


@pytest.mark.parametrize("form", ["stacked", "shared label", "flat"])
def test_the_rows_of_an_example_are_averaged_before_clipping(form):
    dataset = Rows(form)
    source = DataLoader(dataset, collate_fn=flat) if form == "flat" else dataset
    model = linear()
    training, _, _ = make(
        model, source, torch.optim.SGD(model.parameters(), lr=1.0), rows_per_example=3, noise_multiplier=0,
        threshold=Constant(1.1), steps=1, physical_batch_size=5, batch_size=10,
    )  # fmt: skip
    drawn = training.loader.sampler.draw(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = dataset.x[drawn], dataset.y[drawn]
    wanted = engine.oracle.clipped_gradients(
        model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(-1, 3).mean(1),
        x, y, 1.1,
    )  # fmt: skip
    assert (wanted.norms > 1.1).any()
    assert (wanted.norms < 1.1).any()
    run(training)
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), wanted.sums[name] / 10, rtol=1e-5, atol=1e-6)


class Augmented(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.full((4,), float(i)) + torch.rand(4), i % 3


def test_augmentations_are_asked_for_anew():
    x, y = Repeated(Augmented(), 5)[7]
    assert x.shape == (5, 4)
    assert len(x.unique(dim=0)) == 5
    assert y.tolist() == [1] * 5
    training, _, _ = make(dataset=Repeated(Augmented(), 5), rows_per_example=5)
    assert len(run(training).history) == 6


def test_bad_rows_are_refused():
    training, _, _ = make(dataset=Rows("stacked"), rows_per_example=4)
    with pytest.raises(ValueError, match=r"shape of the batch = \(\d+, 3, 4\) must be \[\d+, 4, ...\]"):
        run(training)
    training, model, _ = make(dataset=Rows("stacked"), rows_per_example=3)
    x, y = next(iter(training.loader))
    with pytest.raises(ValueError, match=r"rows_per_example > 1, qclip runs the model itself; pass the batch"):
        training.loss(model(x.flatten(0, 1)), y)
    with pytest.raises(ValueError, match="rows_per_example = 0 must be >= 1"):
        make(rows_per_example=0)


# Step sizes and sampling


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_scheduled_step_size_sets_the_learning_rate_of_every_step(kind):
    model = linear()
    optimizer = kind(model.parameters(), lr=99.0)
    schedule = schedules.polynomial(0.5, -0.5)
    training, _, _ = make(model, optimizer=optimizer, step_size=schedule)
    run(training)
    assert [record.step_size for record in training.history] == [schedule(t) for t in range(6)]
    training, _, _ = make(step_size=0.25)
    assert {record.step_size for record in run(training).history} == {0.25}


@pytest.mark.parametrize("groups", ["flat", {"weight": "weight", "bias": "bias"}])
def test_normalized_steps_do_not_depend_on_the_scale_of_the_loss(groups):
    ends = []
    for scale in (1.0, 64.0):
        model = linear()
        training, _, _ = make(
            model, rescale_to_unit_norm=True, groups=groups, threshold=ExactQuantile(0.5), noise_multiplier=0.5,
            loss=lambda outputs, targets, scale=scale: scale * F.cross_entropy(outputs, targets, reduction="none"),
        )  # fmt: skip
        run(training)
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        bound = [math.hypot(*record.tau) for record in training.history]
        assert [record.step_size for record in training.history] == pytest.approx([0.5 / b for b in bound])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


def test_a_tensor_learning_rate_is_set_in_place():
    model = linear()
    rate = torch.tensor(1.0)
    training, _, _ = make(model, optimizer=torch.optim.Adam(model.parameters(), lr=rate), step_size=0.125)
    run(training)
    assert rate.item() == 0.125


def test_a_bad_step_size_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"step_size = 0.0 must be > 0"):
        make(step_size=lambda step: 0.5 - 0.1 * step)


def test_uniform_sampling_has_one_batch_size_and_no_privacy():
    training, _, _ = make(sampling="uniform", noise_multiplier=0)
    sizes = []
    for x, y in training.loader:
        sizes.append(len(x))
        training.step(x, y)
    assert sizes == [12] * 6
    assert training.epsilon() == math.inf
    with pytest.raises(ValueError, match="sampling = 'uniform' must be \"poisson\" with noise"):
        make(sampling="uniform")
    with pytest.raises(ValueError, match="sampling = 'shuffled' must be one of 'poisson', 'uniform'"):
        make(sampling="shuffled")


class Finite(Problem):
    """``f(x) = mean_i ||x - a_i||^2 / 2`` over a finite data set: the gradients x - a_i have an exact quantile."""

    def __init__(self, points, indices):
        self.points, self.indices, self.dim, self.L = points, indices, points.shape[1], 1.0

    minimiser = property(lambda self: self.points.mean(0))
    f_inf = 0.0

    def loss(self, x):
        return ((x[..., None, :] - self.points) ** 2).sum(-1).mean(-1) / 2

    def grad(self, x):
        return x - self.points.mean(0)

    def draw(self, rng, shape):
        return self.indices.reshape(shape)

    def example_gradients(self, x, xi):
        return x[..., None, :] - self.points[xi]

    def quantile(self, x, p):
        norms = np.linalg.norm(x[..., None, :] - self.points, axis=-1)
        return np.quantile(norms, np.ravel(p)[0], axis=-1, method="inverted_cdf")

    clip_moments = sigma = None


@pytest.mark.parametrize("p", [0.3, 0.7])
def test_without_noise_at_the_exact_quantile_it_is_the_simulated_qc_sgd(monkeypatch, p):
    rng = np.random.default_rng(0)
    points = rng.standard_t(3, (30, 2))
    steps, batch_size = 25, 6
    indices = rng.integers(30, size=(steps, batch_size))
    gamma = schedules.polynomial(0.3, -0.25)
    start = np.array([3.0, -2.0])
    expected = simulate.simulate(
        Finite(points, indices), step_size=gamma, p=p, steps=steps, x0=start, seeds=1, batch_size=batch_size,
        record=range(steps), loop="numpy",
    )  # fmt: skip

    monkeypatch.setattr(UniformSampler, "draw", lambda self, step: indices[step])
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(start)[None])
    visited = []

    def half_square(model, batch):
        (a,) = batch
        ones = torch.ones(len(a), 2, dtype=torch.float64)
        return (model.weight * ones - a).square().sum(1) / 2

    training = make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), TensorDataset(torch.tensor(points)),
        per_example_loss=half_square, batch_size=batch_size, steps=steps, noise_multiplier=0, sampling="uniform",
        threshold=ExactQuantile(p, over="dataset"), step_size=gamma,
    )  # fmt: skip
    for batch in training.loader:
        visited.append(model.weight.detach().numpy()[0].copy())
        training.step(batch)
    np.testing.assert_allclose(visited, expected.x[:-1, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([r.tau[0] for r in training.history], expected.tau[:-1, 0], rtol=1e-6)
    np.testing.assert_allclose(model.weight.detach().numpy()[0], expected.final[0], rtol=1e-6)


# Thresholds that see raw norms


def norms(model, x, y):
    return engine.oracle.clipped_gradients(
        model, lambda out, y: F.cross_entropy(out, y, reduction="none"), x, y, 1.0
    ).norms


@pytest.mark.parametrize("door", ["fused", "ordinary"])
def test_the_exact_quantile_is_that_of_the_batch(door):
    training, model, optimizer = make(threshold=ExactQuantile(0.6), noise_multiplier=0)
    for x, y in training.loader:
        wanted = np.quantile(norms(model, x, y).numpy(), 0.6, method="inverted_cdf")
        if door == "fused":
            training.step(x, y)
        else:
            training.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert training.history[-1].tau[0] == pytest.approx(wanted, rel=1e-5)
    assert training.epsilon() == math.inf


@pytest.mark.parametrize("door", ["fused", "ordinary"])
def test_the_exact_quantile_over_the_data_set_is_that_of_all(door):
    dataset = data()
    training, model, optimizer = make(
        dataset=dataset, threshold=ExactQuantile(0.6, over="dataset"), noise_multiplier=0, physical_batch_size=5
    )
    wanted = []
    for x, y in training.loader:
        if not wanted or training.updated:
            wanted.append(np.quantile(norms(model, *dataset.tensors).numpy(), 0.6, method="inverted_cdf"))
        if door == "fused":
            training.step(x, y)
        else:
            training.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [record.tau[0] for record in training.history] == pytest.approx(wanted, rel=1e-5)


def test_the_rolling_quantile_is_that_of_the_norms_before():
    training, model, _ = make(threshold=RollingQuantile(0.6, window=20), noise_multiplier=0)
    past = []
    for x, y in training.loader:
        current = norms(model, x, y).tolist()
        wanted = np.quantile(past[-20:] or current, 0.6, method="inverted_cdf")
        training.step(x, y)
        past += current
        assert training.history[-1].tau[0] == pytest.approx(wanted, rel=1e-5)


def test_a_quantile_of_the_batch_needs_the_whole_batch():
    with pytest.raises(ValueError, match="ExactQuantile needs the norms of the whole batch before it clips"):
        make(threshold=ExactQuantile(0.5), physical_batch_size=4)
    with pytest.raises(ValueError, match=r"threshold = 0.5 must be a Threshold; pass qclip.Constant"):
        make(threshold=0.5)
    with pytest.raises(ValueError, match="non-private"):
        make(threshold=ExactQuantile(0.5), epsilon=1.0, noise_multiplier=None)


# Accounting


def reference(kind, z, rate, steps, delta):
    accountant = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[kind](
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    event = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), steps)
    return accountant.compose(event).get_epsilon(delta)


@pytest.mark.parametrize(("kind", "groups"), [("pld", "flat"), ("rdp", "flat"), ("rdp", "per-layer")])
def test_epsilon_is_dp_accountings_and_the_curve_is_never_below(kind, groups):
    threshold = GeometricQuantile(0.5)
    training, _, _ = make(accountant=kind, groups=groups, threshold=threshold, steps=12, noise_multiplier=1.5)
    for batch in training.loader:
        training.step(batch)
        done = len(training.history)
        if done % 4 == 1:
            exact = reference(kind, 1.5, 0.2, done, 1e-4)
            assert exact <= training.epsilon() <= exact * (1 + 1e-9)  # with room for the rounding of its transforms
            assert exact <= training.epsilon_curve(done)
    assert training.epsilon_curve(12) == pytest.approx(training.epsilon(), rel=1e-8)
    assert training.epsilon(1e-3) < training.epsilon(1e-5)


def test_a_budget_is_met_by_either_accountant():
    pld_run, _, _ = make(epsilon=2.0, noise_multiplier=None)
    rdp_run, _, _ = make(epsilon=2.0, noise_multiplier=None, accountant="rdp")
    assert rdp_run.plan.noise_multiplier > pld_run.plan.noise_multiplier
    for training in (pld_run, rdp_run):
        assert 1.98 < run(training).epsilon() <= 2.0
    with pytest.raises(ValueError, match="accountant = 'gdp' must be one of 'pld', 'rdp'"):
        make(accountant="gdp")


# Divergence


@pytest.mark.parametrize("door", ["fused", "ordinary"])
def test_nan_from_the_first_step_on_is_refused_and_costs_nothing(door):
    model = linear()
    with torch.no_grad():
        model.weight.fill_(math.nan)
    training, _, _ = make(model)
    x, y = next(iter(training.loader))
    with pytest.raises(ValueError, match=r"not finite for any example, because the parameters are not finite: lower"):
        training.step(x, y) if door == "fused" else training.loss(model(x), y).backward()
    assert training.history == ()
    training, model, _ = make(dataset=TensorDataset(torch.full((60, 4), math.nan), torch.zeros(60, dtype=torch.long)))
    with pytest.raises(ValueError, match="not finite for any example at the first step: look for NaN in the inputs"):
        run(training)
    assert model.weight.isfinite().all()


def test_one_finite_example_decides_whether_the_first_step_is_refused():
    """A refusal may say something about the data that no noise covers: docs/sharp-edges.md says so."""

    def first_step(finite):
        x = torch.full((60, 4), math.nan)
        x[:finite] = 1.0
        training, *_ = make(dataset=TensorDataset(x, torch.zeros(60, dtype=torch.long)), batch_size=60)
        training.step(next(iter(training.loader)))
        return len(training.history)

    with pytest.raises(ValueError, match="not finite for any example"):
        first_step(finite=0)
    assert first_step(finite=1) == 1


def test_an_unlucky_batch_later_on_is_a_step_like_any_other():
    points, labels = data().tensors
    training, model, _ = make(dataset=TensorDataset(points, labels), threshold=Constant(1.0))
    healthy = points.clone()
    for k, (x, y) in enumerate(training.loader):
        assert bool(x.isnan().all()) == (k == 2)
        training.step(x, y)
        points.copy_(torch.full_like(points, math.nan) if k == 1 else healthy)
    assert len(training.history) == 6
    assert model.weight.isfinite().all()


def test_labels_out_of_range_are_named():
    dataset = TensorDataset(torch.zeros(60, 4), torch.full((60,), 7))
    training, _, _ = make(dataset=dataset)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        run(training)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="trainable"):
        make(linear().requires_grad_(False), optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


# Certificates


def quadratic(threshold, *, steps=200, groups="flat", kind=torch.optim.SGD, **settings):
    """Private SGD on ``E ||x - a||^2 / 2``: L = 1 and sigma is the spread of the points."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(400, 3, generator=generator)
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)

    def loss(model, batch):
        return (model.weight * torch.ones_like(batch[0]) - batch[0]).square().sum(1) / 2

    optimizer = kind(model.parameters(), lr=0.05, **settings)
    training = make_private(
        model, optimizer, TensorDataset(points), per_example_loss=loss, batch_size=100, steps=steps,
        noise_multiplier=0.5, threshold=threshold, groups=groups, delta=1e-4, seed=0,
    )  # fmt: skip
    centre = points.mean(0)
    visited = []
    for batch in training.loader:
        visited.append(float((model.weight.detach()[0] - centre).square().sum()))
        training.step(batch)
    spread = float((points - centre).square().sum(1).mean().sqrt())
    gap = float((torch.ones(3) - centre).square().sum()) / 2
    return training, theory.Assumptions(L=1.0, sigma=spread, q=2.0, gap=gap), visited


THRESHOLDS_NEAR = [
    GeometricQuantile(0.9, initial=3.0), PrivateQuantile(0.9, initial=3.0), HistogramQuantile(0.9, initial=3.0),
    SlackQuantile(0.6, initial=2.0), BalancedThreshold(initial=3.0),
]  # fmt: skip


@pytest.mark.parametrize("threshold", THRESHOLDS_NEAR)
def test_the_certificate_of_a_run_holds(threshold):
    training, assumptions, visited = quadratic(threshold)
    found = training.certificate(assumptions)
    assert np.mean(visited) < found.total < found.this_run.total
    stricter = training.certificate(assumptions, confidence=0.999)
    assert stricter.total == found.total
    assert stricter.this_run.total > found.this_run.total


def test_a_certificate_is_refused_where_the_theorem_is_not():
    training, assumptions, _ = quadratic(GeometricQuantile(0.9), steps=2, kind=torch.optim.Adam)
    with pytest.raises(ValueError, match="optimizer was Adam at step 0, but a certificate needs SGD"):
        training.certificate(assumptions)
    training, _, _ = make(groups="per-layer", threshold=GeometricQuantile(0.9))
    with pytest.raises(ValueError, match="groups"):
        run(training).certificate(assumptions)
    training, _, _ = make(threshold=GeometricQuantile(0.9))
    with pytest.raises(ValueError, match="steps = 0 must be >= 1"):
        training.certificate(assumptions)


# Precision


@pytest.mark.parametrize("door", ["fused", "ordinary"])
@pytest.mark.parametrize("precision", ["autocast", "bfloat16 parameters"])
def test_sixteen_bits_are_clipped_and_summed_in_thirty_two(door, precision, recorder):
    model = linear() if precision == "autocast" else linear().bfloat16()
    x, y = data().tensors
    dataset = TensorDataset(x if precision == "autocast" else x.bfloat16(), y)
    training, _, optimizer = make(model, dataset, threshold=Constant(0.1))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        for x, y in training.loader:
            if door == "fused":
                training.step(x, y)
            else:
                training.loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(training.history) == 6
    sums = [tensor for value in recorder.values for tensor in value.tensors.values()]
    assert {tensor.dtype for tensor in sums} == {torch.float32}  # the mechanism rounds them after the noise
    raw = [torch.cat([t.flatten() for t in value.tensors.values()]).norm() for value in recorder.values]
    assert all(norm <= 0.1 * 60 for norm in raw)
    assert model.weight.dtype == (torch.float32 if precision == "autocast" else torch.bfloat16)

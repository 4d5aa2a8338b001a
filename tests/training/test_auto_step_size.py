"""The learning rate that finds itself: on quadratics by itself, and in private runs."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip import theory
from qclip.thresholds import BalancedThreshold, PrivateQuantile
from qclip.training.auto_step_size import AutoStepSize
from qclip.training.make import make_private

DIM, CURVED, STEPS = 2000, 50, 200
CURVATURES = torch.cat([torch.logspace(0, -1.5, CURVED), torch.zeros(DIM - CURVED)])
"""As of a network: most directions are flat, and most of the noise is there."""


def noises(noise_power, seed):
    generator = torch.Generator().manual_seed(seed)
    return math.sqrt(noise_power / DIM) * torch.randn(STEPS, DIM, generator=generator)


def loss_at(x):
    return (CURVATURES * x.square()).sum(-1) / 2


START = torch.cat([torch.ones(CURVED), torch.zeros(DIM - CURVED)])


def clipped_gradient(x, scale):
    """The gradient times ``scale``, in units of the clip norm: no longer than 1."""
    gradient = scale * CURVATURES * x
    return gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1)


def descend(scale, noise_power, *, momentum=0.0, seed=0):
    """Descend ``x' H x / 2`` by noisy clipped gradients: the loss at the end, and the rate of each step."""
    x = START.clone()
    optimizer = torch.optim.SGD([x], momentum=momentum)
    auto, rates = AutoStepSize(STEPS, momentum), []
    for step, noise in enumerate(noises(noise_power, seed)):
        x.grad = clipped_gradient(x, scale) + noise
        rates.append(auto.next_rate(step, [x.grad], [x], noise_power))
        optimizer.param_groups[0]["lr"] = rates[-1]
        optimizer.step()
    return loss_at(x).item(), rates


def best_fixed(scale, noise_power, momentum):
    """The best rate of a grid with factors of 2, fixed and in the second half down to 0, and its mean loss."""
    rates = 2.0 ** torch.arange(-9, 6)
    x, velocity = START.expand(3, len(rates), DIM), torch.zeros(())
    noise = torch.stack([noises(noise_power, seed) for seed in range(3)])
    for step in range(STEPS):
        velocity = momentum * velocity + clipped_gradient(x, scale) + noise[:, step, None]
        x = x - rates[:, None] * min(1.0, (STEPS - step) / (STEPS / 2)) * velocity
    losses = loss_at(x).mean(0).nan_to_num(math.inf, math.inf)
    return rates[losses.argmin()].item(), losses.min().item()


@pytest.mark.parametrize("noise_power", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("scale", "most_rate", "most_loss"), [(0.1, 6, 2), (1.0, 6, 2), (10.0, 18, 7)])
def test_on_a_quadratic_it_ends_near_the_best_fixed_rate(scale, most_rate, most_loss, momentum, noise_power):
    """Whatever the scale of the gradient: the best rates range over a factor of 64.

    Over 24 seeds the rates were 0.5 to 4.1 times the best, and the mean losses of three runs 0.75 to 1.5 times. At the
    scale of 10, where gradients are clipped for half of the run, the rates were up to 12.7 times the best, and the
    losses 5.6 times.
    """
    best, loss = best_fixed(scale, noise_power, momentum)
    runs = [descend(scale, noise_power, momentum=momentum, seed=seed) for seed in range(3)]
    for _, rates in runs:
        assert best / 4 < rates[STEPS // 2 - 1] < most_rate * best
    assert sum(loss for loss, _ in runs) / 3 < most_loss * loss


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_without_noise_it_converges(scale, momentum):
    """A rate at which the gradient turns round at every step is clipped, and the decay makes it stable."""
    loss, rates = descend(scale, 0.0, momentum=momentum)
    assert rates[STEPS // 2 - 1] < 10
    assert loss < 1e-4 * loss_at(START)


class Reference:
    """The equations of the class, one number at a time, in float64."""

    def __init__(self, num_steps, momentum=0.0):
        self.rate, self.m, self.v, self.before = 0.0, None, None, None
        self.num_steps, self.momentum = num_steps, momentum

    def next_rate(self, step, u, x, noise_power):
        u, x = u.double(), x.double()
        if step == 0:
            self.rate = (1 - self.momentum) * min(3.0, 40 / math.sqrt(self.num_steps * (1 + noise_power)))
        else:
            taken = (self.before - x) / self.rate
            self.m = taken if self.m is None else 0.98 * self.m + 0.02 * taken
        excess = (u @ u).item() - noise_power
        self.v = excess if self.v is None else 0.9 * self.v + 0.1 * excess
        if self.m is not None:
            doubt = 2 * math.sqrt(noise_power / len(u))
            c = (u @ self.m).item() / (max(math.sqrt(max(self.v, 0)), doubt) * self.m.norm().item())
            self.rate *= math.exp(0.1 * max(-1, min(1, c)))
        self.before = x.clone()
        return self.rate


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"weight_decay": 0.5}, {"momentum": 0.9, "nesterov": True}]
)
@pytest.mark.parametrize(("num_steps", "noise_power"), [(100, 0.0), (1000, 0.01), (100, 3.0), (10_000, 3.0)])
def test_it_follows_its_equations(settings, num_steps, noise_power):
    """The direction is that of the parameters, so that momentum and weight decay are part of it."""
    momentum = settings.get("momentum", 0.0)
    auto, twin = AutoStepSize(num_steps, momentum), Reference(num_steps, momentum)
    generator = torch.Generator().manual_seed(0)
    x = START.clone()
    optimizer = torch.optim.SGD([x], **settings)
    for step in range(50):
        x.grad = CURVATURES * x + math.sqrt(noise_power / DIM) * torch.randn(DIM, generator=generator)
        pieces = [t.split([20, 1, DIM - 21]) for t in (x.grad, x)]
        rate = auto.next_rate(step, *pieces, noise_power)
        assert rate == pytest.approx(twin.next_rate(step, x.grad, x, noise_power), rel=1e-3)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


def along(auto, num_steps, gradient=lambda step: torch.full((3,), 0.1)):
    """The rates on a slope that goes on for ever; a gradient that is not finite is not applied."""
    x, rates = torch.zeros(3), []
    for step in range(num_steps):
        u = gradient(step)
        rates.append(auto.next_rate(step, [u], [x], 0.0))
        x = x - rates[-1] * u.nan_to_num(0, 0, 0)
    return rates


@pytest.mark.parametrize("num_steps", [1, 2, 7, 60])
def test_in_the_second_half_it_decays_linearly(num_steps):
    rates = along(AutoStepSize(num_steps), num_steps)
    first = math.ceil(num_steps / 2)
    assert all(low < high for low, high in itertools.pairwise(rates[:first]))
    length = num_steps - first
    assert rates[first:] == pytest.approx([rates[first - 1] * (length - k) / length for k in range(length)])
    assert all(rate > 0 for rate in rates)


def test_it_is_bounded():
    assert along(AutoStepSize(400), 200)[-1] == 1e3


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_passed_over(wrong):
    rates = along(AutoStepSize(100), 20, lambda step: torch.full((3,), wrong if step == 5 else 0.1))
    assert all(map(math.isfinite, rates))
    assert rates[5] == rates[4]
    assert rates[6] < rates[-1] / 2  # it goes on learning


def test_a_state_is_a_snapshot():
    def go_on(auto, x, steps):
        rates = []
        for step in steps:
            rates.append(auto.next_rate(step, [x / 10], [x], 0.001))
            x = x - rates[-1] * x / 10
        return rates, x

    first, second, third = (AutoStepSize(100) for _ in range(3))
    _, x = go_on(first, torch.ones(3), range(10))
    state = first.state_dict()
    kept = copy.deepcopy(state)
    expected, _ = go_on(first, x, range(10, 20))
    for other, found in ((second, state), (third, kept)):
        other.load_state_dict(found)
        assert go_on(other, x, range(10, 20))[0] == expected


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())


def model(dtype=torch.float32):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def made(optimizer=torch.optim.SGD, *, dtype=torch.float32, network=None, optimizers=None, **settings):
    network = model(dtype) if network is None else network
    momentum = settings.pop("momentum", 0.0)
    chosen = optimizer(network.parameters(), **{"momentum": momentum} if momentum else {})
    given = {"steps": 12, "noise_multiplier": 1.0, "step_size": "auto", "seed": 5} | settings
    examples = TensorDataset(*(part.to(dtype) if part.is_floating_point() else part for part in data().tensors))
    return network, make_private(
        network, optimizers or chosen, examples, loss=nn.CrossEntropyLoss(), batch_size=100, delta=1e-4, **given
    )


def trained(training, stop=math.inf):
    for x, y in training.loader:
        training.step(x, y)
        if len(training.history) >= stop:
            break
    return training


def rates(training):
    """In units of the clip norm."""
    return [record.step_size * math.hypot(*record.tau) for record in training.history]


@pytest.mark.parametrize(
    ("threshold", "groups"),
    [(BalancedThreshold(), "flat"), (BalancedThreshold(), "per-layer"), (PrivateQuantile(0.9), "per-layer")],
    ids=["flat", "per layer", "quantiles"],
)
def test_a_private_run_learns_with_it(threshold, groups):
    """The first rate is 40 / sqrt(T (1 + S)), S the power of the noise on the rescaled gradient."""
    network, training = made(steps=300, threshold=threshold, groups=groups, noise_multiplier=0.5)
    trained(training)
    x, y = data().tensors
    assert (network(x).argmax(1) == y).float().mean() > 0.75  # a guess has 0.5
    first = training.history[0]
    power = sum(s * tau**2 for s, tau in zip(first.noise_power, first.tau, strict=True)) / math.hypot(*first.tau) ** 2
    assert rates(training)[0] == pytest.approx(40 / math.sqrt(300 * (1 + power)))
    assert rates(training)[-1] == pytest.approx(rates(training)[149] / 150)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("stop", [1, 4, 6, 9])
def test_a_resumed_run_is_the_run_that_would_have_been(stop, momentum, tmp_path):
    """In the first half, where rates are learnt, and in the second, where they decay."""
    whole, training = made(momentum=momentum)
    history = trained(training).history
    path = tmp_path / "run.pt"
    trained(made(momentum=momentum)[1], stop=stop).save(path)
    resumed, second = made(momentum=momentum, seed=None)
    second.load(path)
    assert trained(second).history == history
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_it_is_part_of_what_a_run_is(tmp_path):
    trained(made()[1], stop=2).save(tmp_path / "run.pt")
    _, other = made(step_size=0.1, rescale_to_unit_norm=True)
    with pytest.raises(ValueError, match=r"schedules\['step_size'\] = \[0.1\] must be \['auto'\]"):
        other.load(tmp_path / "run.pt")


def test_physical_batches_do_not_change_it():
    whole, pieces = (trained(made(physical_batch_size=size)[1]) for size in (None, 30))
    assert rates(pieces) == pytest.approx(rates(whole), rel=1e-4)
    assert len(set(rates(whole)[:6])) == 6


def two_optimizers(first, second):
    return [torch.optim.SGD(layer.parameters(), lr=lr) for layer, lr in ((first, 0.1), (second, 7.0))]


def two_groups(first, second):
    return [torch.optim.SGD([{"params": first.parameters()}, {"params": second.parameters(), "lr": 7.0}], lr=0.1)]


@pytest.mark.parametrize("divided", [two_optimizers, two_groups])
def test_several_optimizers_and_groups_of_parameters_have_one_rate(divided):
    network = model()
    optimizers = divided(network[0], network[2])
    _, training = made(network=network, optimizers=optimizers)
    assert trained(training).history == trained(made()[1]).history
    assert len({group["lr"] for optimizer in optimizers for group in optimizer.param_groups}) == 1


def test_an_ordinary_loop_finds_the_same_rates():
    _, fused = made()
    network = model()
    optimizer = torch.optim.SGD(network.parameters())
    _, training = made(network=network, optimizers=optimizer)
    for x, y in training.loader:
        training.loss(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert rates(training) == pytest.approx(rates(trained(fused)), rel=1e-4)


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_it_works_without_noise(sampling):
    network, training = made(noise_multiplier=0.0, sampling=sampling, steps=60)
    trained(training)
    assert rates(training)[0] == 3.0  # of a short run
    assert max(rates(training)) > 3.3  # gradients agree at first
    x, y = data().tensors
    assert (network(x).argmax(1) == y).float().mean() > 0.85


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.2), (torch.float64, 1e-3)], ids=str)
def test_parameters_of_other_precisions(dtype, within):
    """16-bit numbers round steps and products, but the rate is found as with 32."""
    usual, other = (trained(made(dtype=kind, steps=30)[1]) for kind in (torch.float32, dtype))
    assert rates(other)[:15] == pytest.approx(rates(usual)[:15], rel=within)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, type("MySGD", (torch.optim.SGD,), {})])
def test_other_optimizers_are_refused(optimizer):
    name = optimizer.__name__
    with pytest.raises(ValueError, match=f"step_size = \"'auto' with {name}\" must be left out .*torch.optim.SGD"):
        made(optimizer)


def test_several_momenta_are_refused():
    network = model()
    groups = [{"params": network[0].parameters(), "momentum": 0.9}, {"params": network[2].parameters()}]
    with pytest.raises(ValueError, match=r"momentum = \[0.0, 0.9\] must be one value .*; give all groups"):
        made(network=network, optimizers=torch.optim.SGD(groups))


def test_climbing_is_refused():
    network = model()
    with pytest.raises(ValueError, match=r"maximize = True must be False .*; negate the loss"):
        made(network=network, optimizers=torch.optim.SGD(network.parameters(), maximize=True))


@pytest.mark.parametrize(("name", "remedy"), [("fast", "check the spelling"), ("Auto", "did you mean 'auto'")])
def test_other_words_are_refused(name, remedy):
    with pytest.raises(ValueError, match=f"step_size = '{name}' must be one of 'auto'; {remedy}"):
        made(step_size=name)


def test_there_is_no_certificate_for_it():
    training = trained(made(threshold=PrivateQuantile(0.9))[1])
    with pytest.raises(ValueError, match="found from the gradient of that step itself"):
        training.certificate(theory.Assumptions(L=1.0, sigma=1.0, q=2.0, gap=1.0))

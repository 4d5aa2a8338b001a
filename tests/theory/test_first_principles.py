"""The lemmas and theorems against laws with a few atoms, where every expectation is a finite sum.

On ``f(x) = L/2 ||x||^2`` the smoothness inequality is an equality, so one step moves the loss in expectation by
``-gamma <grad, m> + gamma^2 L/2 E||update||^2``, with nothing bounded on the way.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qclip.theory import (
    Assumptions,
    bias_floor,
    bound,
    bound_groups,
    bound_private,
    certificate,
    group_noise,
    lemma1_bias,
    lemma1_threshold,
    lemma2_descent,
    max_step,
    max_step_private,
)


@dataclass(frozen=True)
class Law:
    """A per-example gradient that takes the rows of ``atoms`` with these probabilities."""

    atoms: np.ndarray
    weights: np.ndarray

    @property
    def grad(self):
        return self.weights @ self.atoms

    @property
    def norms(self):
        return np.linalg.norm(self.atoms, axis=1)

    def sigma(self, q):
        return float(self.weights @ np.linalg.norm(self.atoms - self.grad, axis=1) ** q) ** (1 / q)

    def quantile(self, p):
        order = np.argsort(self.norms)
        reached = np.cumsum(self.weights[order]) >= p - 1e-12
        return float(self.norms[order][np.argmax(reached)])

    def factors(self, tau):
        return np.where(self.norms <= tau, 1.0, tau / np.maximum(self.norms, 1e-300))

    def clipped(self, tau):
        """Mean and mean square of a clipped gradient."""
        rows = self.factors(tau)[:, None] * self.atoms
        return self.weights @ rows, float(self.weights @ (rows**2).sum(1))

    def group(self, columns):
        return Law(self.atoms[:, columns], self.weights)


def change_of_loss(groups, taus, gamma, L, *, batch_size=1, noise_power=0.0, sampling="iid"):
    """The exact expected change of the loss in one step; ``noise_power`` is E||noise||^2 on the sum of the batch."""
    inner = second = 0.0
    for law, tau in zip(groups, taus, strict=True):
        mean, square = law.clipped(tau)
        one = square if sampling == "poisson" else square - mean @ mean
        inner += law.grad @ mean
        second += mean @ mean + one / batch_size
    return -gamma * inner + gamma**2 * L / 2 * (second + noise_power / batch_size**2)


number = st.floats(-10, 10).map(lambda x: round(x, 3))


@st.composite
def scattered(draw):
    """A few atoms anywhere, the first of them sometimes far away."""
    count = draw(st.integers(2, 6))
    atoms = np.array(draw(st.lists(st.tuples(number, number, number), min_size=count, max_size=count)))
    weights = np.array(draw(st.lists(st.integers(1, 30), min_size=count, max_size=count)), dtype=float)
    atoms[0] *= draw(st.sampled_from([1.0, 30.0]))
    atoms += draw(st.sampled_from([0.0, 5.0]))
    return Law(atoms, weights / weights.sum())


@st.composite
def spikes(draw):
    """A gradient without noise but for rare far atoms, on both sides or one: where Lemma 1 is attained."""
    grad = np.array([draw(st.sampled_from([0.0, 0.01, 1.0])), 0.0, 0.0])
    rare, far = draw(st.floats(0.001, 0.4)), np.array([draw(st.floats(0.1, 100)), 0.0, 0.0])
    if draw(st.booleans()):
        return Law(np.array([grad, grad + far, grad - far]), np.array([1 - rare, rare / 2, rare / 2]))
    return Law(np.array([grad - far * rare / (1 - rare), grad + far]), np.array([1 - rare, rare]))


@st.composite
def cases(draw):
    """A law, and a quantile: any, or the least one at which the threshold jumps to the next atom."""
    law = draw(st.one_of(scattered(), spikes()))
    jumps = np.cumsum(law.weights[np.argsort(law.norms)])[:-1]
    p = draw(st.one_of(quantiles, st.sampled_from([min(jump * (1 + 1e-9), 0.9995) for jump in jumps.tolist()])))
    return law, p


moments = st.sampled_from([1.1, 1.5, 1.8, 2.0])
quantiles = st.floats(0.02, 0.98)
shares = st.floats(0.01, 1.0)
thorough = settings(max_examples=200)
SLACK = 1e-9


def slack(a, G):
    """Room for rounding, relative to the size of the quantities compared."""
    return SLACK * (a.sigma**2 + G**2 + 1)


@thorough
@given(cases(), moments)
def test_lemma_1(case, q):
    law, p = case
    a = Assumptions(L=1, sigma=law.sigma(q), q=q, gap=0)
    G, tau = float(np.linalg.norm(law.grad)), law.quantile(p)
    assert tau <= lemma1_threshold(a, p, G) * (1 + SLACK)
    mean, _ = law.clipped(tau)
    alpha = law.weights @ law.factors(tau)
    assert alpha >= p - SLACK
    assert np.linalg.norm(mean - alpha * law.grad) <= lemma1_bias(a, p) * (1 + SLACK) + SLACK


@thorough
@given(cases(), moments, st.floats(0.01, 3), st.floats(0.01, 2), st.floats(0.1, 10))
def test_lemma_2(case, q, gamma, beta, L):
    law, p = case
    a = Assumptions(L=L, sigma=law.sigma(q), q=q, gap=0)
    G, tau = float(np.linalg.norm(law.grad)), law.quantile(p)
    alpha = min(1.0, float(law.weights @ law.factors(tau)))
    exact = change_of_loss([law], [tau], gamma, L)
    known = lemma2_descent(a, gamma, p, G, beta=beta, mean_factor=alpha)
    assert exact <= known + slack(a, G) * (1 + gamma**2 * L)
    assert known <= lemma2_descent(a, gamma, p, G, beta=beta) + slack(a, G)


def one_step_holds(found, exact, gamma, a, G, *, weight=1):
    """``E f(x1) - f(x0) <= gamma c (variance + bias - G^2)``: what the theorem sums over the steps.

    Theorem 1 as printed is twice that inequality (``weight=2``).
    """
    return weight * exact / gamma <= found.c * (found.variance + found.bias - G**2) + slack(a, G)


@pytest.mark.parametrize("form", ["printed", "corrected", "sharp"])
@thorough
@given(case=cases(), q=moments, share=shares, L=st.floats(0.1, 10), constants=st.floats(0.05, 0.9))
def test_theorem_1(form, case, q, share, L, constants):
    law, p = case
    a = Assumptions(L=L, sigma=law.sigma(q), q=q, gap=0)
    G, tau = float(np.linalg.norm(law.grad)), law.quantile(p)
    for beta, c in ((None, None), (constants * p, (1 - constants) * p / 2)):
        gamma = 0.999 * share * max_step(a, p, beta, c, form)
        found = bound(a, gamma, p, beta, c, steps=1, form=form)
        exact = change_of_loss([law], [tau], gamma, L)
        assert one_step_holds(found, exact, gamma, a, G, weight=2 if form == "printed" else 1)


@pytest.mark.parametrize("sampling", ["iid", "poisson"])
@pytest.mark.parametrize("form", ["corrected", "sharp"])
@thorough
@given(case=cases(), q=moments, share=shares, batch_size=st.sampled_from([1, 2, 16]), z=st.floats(0, 8))
def test_theorem_2(form, sampling, case, q, share, batch_size, z):
    law, p = case
    a = Assumptions(L=2, sigma=law.sigma(q), q=q, gap=0)
    G, tau, dim = float(np.linalg.norm(law.grad)), law.quantile(p), law.grad.size
    public = {"batch_size": batch_size, "noise_multiplier": z, "dim": dim, "form": form, "sampling": sampling}
    gamma = 0.999 * share * max_step_private(a, p, **public)
    found = bound_private(a, gamma, p, steps=1, **public)
    power = dim * (z * tau) ** 2
    step = {"batch_size": batch_size, "noise_power": power, "sampling": sampling}
    exact = change_of_loss([law], [tau], gamma, a.L, **step)
    assert one_step_holds(found, exact, gamma, a, G)


@thorough
@given(law=st.one_of(scattered(), spikes()), q=moments, tau=st.floats(0.01, 30), share=shares, z=st.floats(0, 4))
def test_theorem_2_with_an_inexact_quantile(law, q, tau, share, z):
    """A threshold that is not a quantile: P(||g|| <= tau) from below and P(||g|| < tau) from above say enough."""
    p_lo, p_hi = float(law.weights @ (law.norms <= tau)), float(law.weights @ (law.norms < tau))
    assume(0.01 < p_lo < 0.99)
    a = Assumptions(L=2, sigma=law.sigma(q), q=q, gap=0)
    public = {"batch_size": 4, "noise_multiplier": z, "dim": 3}
    for form in ("corrected", "sharp"):
        gamma = 0.999 * share * max_step_private(a, p_lo, **public, form=form)
        found = bound_private(a, gamma, p_lo, steps=1, p_hi=max(p_lo, p_hi), **public, form=form)
        power = 3 * (z * tau) ** 2
        exact = change_of_loss([law], [tau], gamma, a.L, batch_size=4, noise_power=power, sampling="poisson")
        assert one_step_holds(found, exact, gamma, a, float(np.linalg.norm(law.grad)))


@thorough
@given(law=scattered(), q=moments, p=st.tuples(quantiles, quantiles), share=shares, z=st.floats(0, 8))
def test_groups(law, q, p, share, z):
    groups = [law.group([0]), law.group([1, 2])]
    taus = [max(group.quantile(level), 1e-9) for group, level in zip(groups, p, strict=True)]
    a = Assumptions(L=2, sigma=law.sigma(q), q=q, gap=0)
    public = {"dims": [1, 2], "batch_size": 4, "noise_multiplier": z}
    gamma = 0.999 * share * max_step_private(a, min(p), batch_size=4, noise_multiplier=z, dim=3)
    power = group_noise(taus, [1, 2], z).power
    exact = change_of_loss(groups, taus, gamma, a.L, batch_size=4, noise_power=power, sampling="poisson")
    for sigmas in (None, [group.sigma(q) for group in groups]):
        found = bound_groups(a, gamma, list(p), sigmas=sigmas, steps=1, **public)
        assert one_step_holds(found, exact, gamma, a, float(np.linalg.norm(law.grad)))


@thorough
@given(
    law=st.one_of(scattered(), spikes()),
    q=moments,
    tau=st.floats(0.01, 30),
    gamma=st.floats(0.01, 0.5),
    z=st.floats(0, 8),
)
def test_certificate(law, q, tau, gamma, z):
    clipped = float(law.weights @ (law.norms > tau))
    assume(clipped < 0.99)
    a = Assumptions(L=2, sigma=law.sigma(q), q=q, gap=0)
    found = certificate(a, [gamma], [tau], [clipped], batch_size=4, noise_multiplier=z, dim=3)
    power = 3 * (z * tau) ** 2
    exact = change_of_loss([law], [tau], gamma, a.L, batch_size=4, noise_power=power, sampling="poisson")
    assert one_step_holds(found, exact, gamma, a, float(np.linalg.norm(law.grad)))


@thorough
@given(case=cases(), q=moments, eta=st.floats(1e-3, 10), L=st.floats(0.1, 10), z=st.floats(0, 4))
def test_normalized_steps_without_a_condition(case, q, eta, L, z):
    """docs/theory.md, section 18 (ii), for one step of size eta over the exact quantile."""
    law, p = case
    sigma, G, tau, h = law.sigma(q), float(np.linalg.norm(law.grad)), law.quantile(p), 1 - p
    assume(tau > 1e-6 and sigma > 1e-6)
    S = 1 / 4 + 3 * z**2 / 16
    u, s = sigma * h ** (-1 / q), bias_floor(Assumptions(L=L, sigma=sigma, q=q, gap=0), p) ** 0.5
    exact = change_of_loss([law], [tau], eta / tau, L, batch_size=4, noise_power=3 * (z * tau) ** 2)
    allowed = -eta * p * G**2 / (G + u) + eta * s * (1 + p * s / (s + u)) + eta**2 * L * (1 + S) / 2
    assert exact <= allowed + SLACK * (1 + eta * (G + s) + eta**2 * L)


def test_printed_theorem_2_fails_from_first_principles():
    """Without noise, at a large batch: the step that the print allows overshoots (erratum C)."""
    law = Law(np.array([[1.0]]), np.array([1.0]))
    a = Assumptions(L=1, sigma=0, q=2, gap=0)
    public = {"batch_size": 100, "noise_multiplier": 0, "dim": 1, "form": "printed"}
    gamma = max_step_private(a, 0.9, 0.2, 0.3, **public)
    found = bound_private(a, gamma, 0.9, 0.2, 0.3, steps=1, **public)
    assert not one_step_holds(found, change_of_loss([law], [1.0], gamma, 1, batch_size=100), gamma, a, 1.0)

"""Regularised logistic regression on a finite data set: every oracle is a finite sum."""

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from qclip import _validate as check
from qclip._validate import Floats
from qclip.simulation.problems.noise import ClipMoments, clip_factor
from qclip.simulation.problems.problem import Problem, levels
from qclip.theory.assumptions import moment


class Logistic(Problem):
    """``f(x) = mean_i log(1 + exp(-y_i <a_i, x>)) + ridge/2 ||x||^2`` over rows a_i with labels y_i = ±1.

    Args:
        features: The rows a_i, [n, d].
        labels: The labels y_i, -1 or 1, [n].
        ridge: Weight of the regularisation, above 0.

    Raises:
        Refusal: Shapes or values are out of bounds.
    """

    def __init__(self, features: ArrayLike, labels: ArrayLike, ridge: float = 0.01) -> None:
        self.features = np.array(features, dtype=np.float64)
        self.labels = np.array(labels, dtype=np.float64)
        self.ridge = check.positive("ridge", ridge, "without it separable data have no minimiser")
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1] or not self.labels.size:
            raise check.Refusal(
                f"features {self.features.shape} and labels {self.labels.shape} must have shapes [n, d] and [n]; "
                "give one label per row"
            )
        if not np.isfinite(self.features).all():
            raise check.Refusal("features has NaN or infinite entries; clean or impute the rows first")
        if not np.isin(self.labels, (-1, 1)).all():
            found = np.unique(self.labels)[:5].tolist()
            raise check.refuse("labels", found, "-1 or 1", "map the two classes to -1 and 1")
        self.dim = self.features.shape[1]
        # The logistic loss has curvature at most 1/4 in each row's direction.
        top = np.linalg.eigvalsh(self.features.T @ self.features / len(self.labels))[-1]
        self.L = float(top / 4 + self.ridge)

    def __repr__(self) -> str:
        return f"Logistic(examples={len(self.labels)}, dim={self.dim}, ridge={self.ridge:g})"

    @classmethod
    def generate(
        cls, examples: int, dim: int, rng: np.random.Generator, *, tail: float = np.inf, ridge: float = 0.01
    ) -> "Logistic":
        """Generate Gaussian rows, scaled by a Pareto factor when ``tail`` is finite, and labels from a random model."""
        features = rng.standard_normal((examples, dim)) / np.sqrt(dim)
        if np.isfinite(tail):
            features *= rng.random((examples, 1)) ** (-1 / tail)
        score = features @ rng.standard_normal(dim) * np.sqrt(dim)
        labels = np.where(rng.random(examples) < special.expit(score), 1.0, -1.0)
        return cls(features, labels, ridge)

    @cached_property
    def minimiser(self) -> Floats:  # type: ignore[override]
        """The minimiser, by Newton's method with step halving; f is strongly convex."""
        x = np.zeros(self.dim)
        for _ in range(100):
            gradient = self.grad(x)
            if np.linalg.norm(gradient) < 1e-13 * (1 + np.linalg.norm(x)):
                break
            weight = special.expit(self.features @ x)
            weight *= 1 - weight
            hessian = (self.features * weight[:, None]).T @ self.features / len(self.labels)
            step = np.linalg.solve(hessian + self.ridge * np.eye(self.dim), gradient)
            scale = 1.0
            while self.loss(x - scale * step) > self.loss(x) and scale > 1e-6:
                scale /= 2
            x = x - scale * step
        return x

    @cached_property
    def f_inf(self) -> float:  # type: ignore[override]
        """The loss at the minimiser."""
        return float(self.loss(self.minimiser))

    def loss(self, x: Floats) -> Floats:
        """Return the mean loss, [...]."""
        x = self.point(x)
        margin = self.labels * (x @ self.features.T)
        return np.logaddexp(0, -margin).mean(-1) + self.ridge / 2 * (x**2).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """Return the mean gradient, [..., d]."""
        x = self.point(x)
        return self._pull(x) @ self.features / len(self.labels) + self.ridge * x

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Draw uniform indices of examples."""
        return rng.integers(len(self.labels), size=shape)

    def example_gradients(self, x: Floats, xi: Floats) -> Floats:
        """Return the gradients of the examples with these indices, [..., n, d]."""
        rows = self.features[xi]
        margin = self.labels[xi] * np.einsum("...nd,...d->...n", rows, x)
        pull = -self.labels[xi] * special.expit(-margin)
        return pull[..., None] * rows + self.ridge * x[..., None, :]

    def quantile(self, x: Floats, p: float | Floats) -> Floats:
        """Return the ceil(n p)-th smallest of the n gradient norms, [...]."""
        x, p = self.point(x), levels(p)
        norms = np.sort(self._norms(x), axis=-1)
        n = norms.shape[-1]
        rank = np.clip(np.ceil(np.asarray(p) * n - 1e-9).astype(int), 1, n) - 1
        return np.take_along_axis(norms, np.broadcast_to(rank, norms.shape[:-1])[..., None], -1)[..., 0]

    def clip_moments(self, x: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments, as means over all examples."""
        x = self.point(x)
        n = len(self.labels)
        gradients = self.example_gradients(x, np.broadcast_to(np.arange(n), (*x.shape[:-1], n)))
        norms = np.linalg.norm(gradients, axis=-1)
        factor = clip_factor(norms, np.asarray(tau)[..., None])
        mean = (factor[..., None] * gradients).mean(-2)
        return ClipMoments(factor.mean(-1), mean, ((factor * norms) ** 2).mean(-1))

    def sigma(self, q: float = 2.0) -> float:
        """Return a bound over all x.

        The gradient of an example, without the ridge, is at most as long as its row. Centring costs at most a factor of
        2, and nothing at q = 2; below it the smaller of the two bounds is returned.
        """
        q = moment(q)  # beyond 2 neither bound holds
        size = np.linalg.norm(self.features, axis=1)
        return float(min(np.sqrt((size**2).mean()), 2 * (size**q).mean() ** (1 / q)))

    def sigma_at(self, x: Floats, q: float = 2.0) -> Floats:
        """Return ``(E ||g - grad f||^q)^(1/q)`` at x, exactly, [...]."""
        n = len(self.labels)
        gradients = self.example_gradients(x, np.broadcast_to(np.arange(n), (*x.shape[:-1], n)))
        deviation = np.linalg.norm(gradients - self.grad(x)[..., None, :], axis=-1)
        return (deviation**q).mean(-1) ** (1 / q)

    def _pull(self, x: Floats) -> Floats:
        return -self.labels * special.expit(-self.labels * (x @ self.features.T))

    def _norms(self, x: Floats) -> Floats:
        """Return all gradient norms without forming the gradients: ``||s a + ridge x||^2`` is expanded."""
        pull, along = self._pull(x), x @ self.features.T
        square = pull**2 * (self.features**2).sum(1) + 2 * self.ridge * pull * along
        return np.sqrt(np.maximum(square + self.ridge**2 * (x**2).sum(-1)[..., None], 0))

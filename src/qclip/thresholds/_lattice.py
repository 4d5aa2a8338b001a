"""A lattice of radii on a logarithmic scale, and histograms of norms between them."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from qclip.thresholds.threshold import Count, Counted

T = TypeVar("T")
OUTERMOST = 1e30
"""The last bin ends here: every finite norm is in some bin, so that the fractions add up to 1."""


@dataclass(frozen=True)
class Lattice:
    """Radii ``exp(spacing * place)`` at ``size`` consecutive places, from a lowest one that moves with tau.

    >>> [round(radius, 3) for radius in Lattice(3, 0.5).radii(-1)]
    [0.607, 1.0, 1.649]
    """

    size: int
    spacing: float

    @property
    def num_bins(self) -> int:
        """The number of bins: between the radii and tau, below the first and above the last of them."""
        return self.size + 2

    @property
    def spread(self) -> float:
        """A bound on the noise of a sum of bins that add up to 1, relative to that of one bin."""
        return math.sqrt(self.num_bins) / 2

    def radii(self, lowest: int) -> list[float]:
        """Return the radii from the lowest place on."""
        return [math.exp(self.spacing * (lowest + place)) for place in range(self.size)]

    def count(self, groups: Iterable[tuple[int, float]], *, centred: bool = True) -> Count:
        """Return the question for the norms between the radii, with tau among them, for each group's lowest place."""
        radii = tuple((*sorted((*self.radii(lowest), tau)), OUTERMOST) for lowest, tau in groups)
        return Count(radii, 1 / self.num_bins if centred else 0.0)

    def read(self, lowest: int, tau: float, bins: Sequence[float], noise: float = 1.0) -> tuple[list[float], float]:
        """Return the fractions within the radii, and within tau, by the fractions beyond them.

        Args:
            lowest: The place of the first radius.
            tau: The threshold.
            bins: The noisy fractions in the bins.
            noise: The part of their surplus over 1 that is noise, and not a batch of another size: it is removed.
        """
        surplus = noise * (sum(bins) - 1) / len(bins)
        beyond = np.cumsum([value - surplus for value in reversed(bins)])[::-1]
        fractions = (1 - beyond[1:]).tolist()
        at_tau = fractions.pop(bisect_left(self.radii(lowest), tau))
        return fractions, at_tau

    def counted(self, lowest: int, tau: float, bins: Sequence[float], noise_std: float, noise: float = 1.0) -> Counted:
        """Return the fraction beyond tau as `read` gives it, with the size of its errors.

        It is the sum of the m bins beyond tau less m/M of the removed surplus, linear in all M bins: they have the
        coefficients 1 - w beyond tau and -w within it, w = noise m/M. The bins of an example add up to 1, and the
        surplus has mean 0, so there is no bias.

        >>> found = Lattice(2, 1.0).counted(0, 1.5, [0.2, 0.3, 0.4, 0.1], noise_std=0.1)
        >>> round(found.clipped, 9), round(found.noise, 9), found.reach  # radii 1, 1.5, e
        (0.5, 0.1, 0.5)
        """
        _, within = self.read(lowest, tau, bins, noise)
        beyond, total = len(bins) - 1 - bisect_left(self.radii(lowest), tau), len(bins)
        taken = noise * beyond / total
        variance = beyond * (1 - taken) ** 2 + (total - beyond) * taken**2
        return Counted(1 - within, noise_std * math.sqrt(variance), reach=max(1 - taken, taken))


def shifted(values: Sequence[T], places: int, below: Sequence[T], above: Sequence[T]) -> tuple[T, ...]:
    """Move a window over a lattice up by ``places``, or down where negative.

    Args:
        values: A value for each radius of the window.
        places: The number of places.
        below: Values for all radii of the new window; its first ones are new after a move down.
        above: The same; its last ones are new after a move up.

    >>> shifted("abcd", 1, "wxyz", "WXYZ"), shifted("abcd", -2, "wxyz", "WXYZ"), shifted("abcd", 9, "wxyz", "WXYZ")
    (('b', 'c', 'd', 'Z'), ('w', 'x', 'a', 'b'), ('W', 'X', 'Y', 'Z'))
    """
    new = min(abs(places), len(values))
    kept = len(values) - new
    return (*values[new:], *above[kept:]) if places > 0 else (*below[:new], *values[:kept])

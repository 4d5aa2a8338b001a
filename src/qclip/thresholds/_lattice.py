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
        """Return an upper bound on what clipping takes, with the size of its errors; arguments as for `read`.

        A norm in the bin that ends at r keeps at least tau / r of its length. So the mean of 1 - min(1, tau / r)
        over the bins is a bound; like `read` it leaves out a part of the surplus. It is linear in the bins: an example
        of bin j adds ``w_j - noise mean(w)``. The bins of an example add up to 1, so there is no bias.

        >>> found = Lattice(2, 1.0).counted(0, 2.0, [0.2, 0.3, 0.4, 0.1], noise_std=0.1, noise=0.0)
        >>> round(found.clipped, 6), round(found.noise, 6), found.reach  # ends 1, 2, e, and no end
        (0.205696, 0.103432, 1.0)
        """
        ends = np.array([*sorted((*self.radii(lowest), tau)), math.inf])
        lost = 1 - np.minimum(1.0, tau / ends)
        lost -= noise * (shared := float(lost.mean()))
        clipped = float(lost @ np.asarray(bins)) + noise * shared  # the surplus is their sum less 1
        return Counted(clipped, noise_std * float(np.linalg.norm(lost)), reach=float(np.abs(lost).max()))


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

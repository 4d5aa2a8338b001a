"""What the bits of released values tell about the sum below the noise: an attack, and what rules out its kind."""

import numpy as np
from scipy import stats

TAU = 1.0
"""The bound: with one coordinate, the sum without the example is 0 and with it TAU."""
SETTINGS = [(z, divisor) for z in (1.0, 4.0) for divisor in (1.0, 256.0, 1000.0)]


def finer_than_the_sum(released, divisor):
    """Whether a float32 value has bits that a float32 number of the size of TAU / divisor, plus noise, cannot have.

    Close to 0, where it has cancelled with noise of its own size, a sum near TAU leaves multiples of the spacing of
    float32 numbers at TAU / 2. Noise alone is finer than that.
    """
    released = np.asarray(released, dtype=np.float64)
    spacing = float(np.spacing(np.float32(TAU / divisor / 2)))
    return (np.abs(released) < TAU / divisor / 4) & (released / spacing != np.rint(released / spacing))


def assert_equally_often(one, other):
    """Fails one seed in 2e6 where the probabilities are equal."""
    pooled = (one.mean() + other.mean()) / 2
    error = np.sqrt(pooled * (1 - pooled) * (1 / one.size + 1 / other.size))
    assert abs(one.mean() - other.mean()) <= 5 * error


def assert_on_grid(released, spacing):
    """Every value is a multiple of the spacing, and the last eight bits of the multiples are uniform.

    The second fails one seed in 1e4.
    """
    multiples = np.asarray(released, dtype=np.float64) / spacing
    assert (multiples == np.rint(multiples)).all()
    counts = np.bincount(multiples.astype(np.int64) % 256, minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4

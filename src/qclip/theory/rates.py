"""The exponents of the coupled schedules and the rates they give."""

from dataclasses import dataclass
from typing import Literal

from qclip import _validate as check
from qclip.theory.assumptions import moment

Form = Literal["sharp", "corrected", "printed"]
FORMS: tuple[Form, ...] = ("sharp", "corrected", "printed")


@dataclass(frozen=True)
class Rates:
    """Exponents of ``gamma_t ~ t^(theta - 1)`` and ``1 - p_t ~ t^nu``, and the rate they give.

    The gamma-weighted mean of ``E ||grad f||^2`` decays as ``T^-rate`` (up to a logarithm when the schedules vary
    with t, erratum J); ``||grad f|| <= eps`` takes ``eps^-complexity_exponent`` steps.
    """

    theta: float
    nu: float
    rate: float
    complexity_exponent: float


def rates(q: float, form: Form = "sharp") -> Rates:
    """Return the best exponents under a bounded q-th moment, for the paper's bound or the sharp one.

    >>> rates(2).rate, rates(2).complexity_exponent
    (0.5, 4.0)
    >>> round(rates(2, "printed").rate, 4), round(rates(2, "printed").complexity_exponent, 4)
    (0.3333, 6.0)

    Args:
        q: The bounded moment, in (1, 2].
        form: "printed" balances ``T^-theta + T^(theta-1-2nu/q) + T^(2nu(1-1/q))``; "corrected" has the same powers,
            hence the same exponents; "sharp" balances ``T^-theta + T^(theta-1+nu(1-2/q)) + T^(2nu(1-1/q))``.

    Raises:
        Refusal: Q or form is out of bounds.
    """
    q = moment(q)
    if check.choice("form", form, FORMS) == "sharp":
        theta, nu = (2 * q - 2) / (3 * q - 2), -q / (3 * q - 2)
    else:
        theta, nu = (1 - 1 / q) / (2 - 1 / q), -1 / (4 - 2 / q)
    return Rates(theta=theta, nu=nu, rate=theta, complexity_exponent=2 / theta)

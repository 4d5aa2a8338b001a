"""The plan of a federated run: its public constants, set before the first round."""

import logging
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Refusal

Sampling = Literal["poisson", "fixed"]
log = logging.getLogger("qclip")


@dataclass(frozen=True)
class RoundPlan:
    """The public constants of a federated run."""

    num_clients: int
    cohort_size: int
    """The expected number of clients of a round."""
    rounds: int
    noise_multiplier: float
    """The noise multiplier of the update sum and the counts together."""
    delta: float
    accountant: accounting.Accountant = "pld"
    sampling: Sampling = "poisson"
    epsilon: float | None = None
    """The privacy budget; None if the noise multiplier was given instead."""

    @property
    def sample_rate(self) -> float:
        """The probability with which a client joins a round."""
        return self.cohort_size / self.num_clients

    def require_budget(self, done: int) -> None:
        """Refuse a round beyond the plan."""
        if done >= self.rounds:
            remedy = "plan more rounds from the start: the noise was chosen for this many"
            raise check.refuse("round", done, f"< rounds = {self.rounds}: the budget is spent", remedy)


def plan_rounds(
    num_clients: int,
    cohort_size: int,
    rounds: int,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    accountant: accounting.Accountant = "pld",
    sampling: Sampling = "poisson",
    private: bool = True,
) -> RoundPlan:
    """Compute the public constants of a federated run.

    Args:
        num_clients: The public number of clients.
        cohort_size: The expected number of clients of a round.
        rounds: The number of rounds.
        epsilon: The privacy budget. Exactly one of ``epsilon`` and ``noise_multiplier``.
        delta: By default ``1 / (10 num_clients)``.
        noise_multiplier: The noise multiplier of the update sum and the counts together; 0 for no noise.
        accountant: "pld" (tight) or "rdp".
        sampling: "poisson", or "fixed" without noise.
        private: Whether the threshold is private. With a non-private one no noise meets an epsilon.

    Raises:
        qclip.Refusal: For arguments that are out of bounds or contradict each other.

    >>> plan = plan_rounds(10_000, 100, 50, noise_multiplier=1.0, delta=1e-6)
    >>> plan.sample_rate, plan.rounds
    (0.01, 50)
    """
    num_clients = check.count("num_clients", num_clients, "it is the public number of clients")
    cohort_size = check.count("cohort_size", cohort_size, "it is the expected number of clients of a round")
    rounds = check.count("rounds", rounds, "it is the length of the run")
    if cohort_size > num_clients:
        raise check.refuse("cohort_size", cohort_size, f"<= num_clients = {num_clients}", "take a smaller cohort")
    if (epsilon is None) == (noise_multiplier is None):
        raise Refusal(
            f"exactly one of epsilon and noise_multiplier must be given, not epsilon = {epsilon!r} and "
            f"noise_multiplier = {noise_multiplier!r}: pass the privacy budget, or the noise itself"
        )
    if delta is None:
        delta = 1 / (10 * num_clients)
        if noise_multiplier != 0:
            log.warning("delta = %.3g: 1 / (10 num_clients), because delta was left out", delta)
    delta = check.between("delta", delta, 0, 1, "take it well below 1/num_clients, such as 1e-5")
    check.choice("accountant", accountant, get_args(accounting.Accountant))
    check.choice("sampling", sampling, get_args(Sampling))
    if sampling == "fixed" and noise_multiplier != 0:
        raise check.refuse(
            "sampling",
            sampling,
            '"poisson" with noise: in a cohort of fixed size the others move when a client leaves, so that it is '
            "private only against the replacement of a client, which moves a sum twice as far, and no accountant here "
            "charges for that",
            'take sampling="poisson", or noise_multiplier=0 for a run without privacy',
        )
    if epsilon is not None:
        _check_promise(delta, num_clients, private)
        noise_multiplier = accounting.noise_multiplier(
            epsilon=epsilon, delta=delta, sample_rate=cohort_size / num_clients, steps=rounds, accountant=accountant
        )
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    budget = None if epsilon is None else float(epsilon)
    return RoundPlan(num_clients, cohort_size, rounds, z, delta, accountant, sampling, budget)


def _check_promise(delta: float, num_clients: int, private: bool) -> None:
    if not private:
        raise Refusal(
            "a non-private threshold cannot meet an epsilon: take PrivateQuantile or Constant, or pass "
            "noise_multiplier= instead of epsilon= for a run without a guarantee"
        )
    if delta >= 1 / num_clients:
        warnings.warn(
            f"delta = {delta:g} is not below 1/num_clients = {1 / num_clients:.3g}: publishing one client's data "
            "outright would satisfy it; 1/(10 num_clients) is usual",
            stacklevel=4,
        )

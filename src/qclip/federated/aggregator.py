"""The aggregator of a federated run: `Aggregator`, the stateful shell around the private step of a cohort."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Final, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Refusal
from qclip.accounting import Accountant
from qclip.engine.groups import GroupSpec
from qclip.federated.answers import Terms, contribution
from qclip.federated.plan import RoundPlan, Sampling, plan_rounds
from qclip.federated.updates import Layout, Update, in_float64, pieces
from qclip.thresholds import Conditions, PrivateQuantile, Threshold
from qclip.thresholds.threshold import describe
from qclip.training import checkpoint
from qclip.training.history import History, StepRecord, record_of
from qclip.training.lost_threshold import WINDOW, LostThreshold, explain, lost_groups
from qclip.training.noise import NoiseSource
from qclip.training.sampling import PoissonSampler, UniformSampler
from qclip.training.step import StepRelease, StepRule, StepState, ask, release
from qclip.training.sums import Key, Query, RawSums, raw_sums

MEDIAN: Final = PrivateQuantile(0.5, noise_share=0.02)
"""Measured at noise multiplier 1: from 100 times too high or too low, cohorts of 50 or 100 find the median within 20 %
in 20 rounds, with each of 20 seeds, and cohorts of 20 in 40 rounds. A share of 0.01 is slower with cohorts of 50 (37 of
40 runs) and of 20; one of 0.05 is no faster from 50 on."""
Malformed = Literal["refuse", "drop"]
"""What becomes of an update of another layout: it is refused by name, or counts as one that never came."""
T = TypeVar("T")
log = logging.getLogger("qclip.federated")


class Aggregator:
    """Turns the updates of each round's cohort into their private mean, and moves the clip norm to a quantile.

        aggregator = Aggregator(model, num_clients=10_000, cohort_size=100, rounds=50, epsilon=8, delta=1e-6)
        for _ in range(50):
            updates = (train_client(k, model) for k in aggregator.sample())     # by name: after less before
            mean = aggregator.aggregate(updates)
            for name, parameter in model.named_parameters():
                parameter.data += mean[name]

    Guarantees:
        * Differential privacy for clients, at `epsilon`: whatever all the data of one client are, whether that client
          takes part at all changes the distribution of all that the aggregator releases by no more than that. Released
          are the means, `clip_norms`, `history` and whatever follows from them.
        * A client adds at most `clip_norms` to the sum of a round, and its part of the threshold's counts. Any other
          client's contribution, the divisor (``cohort_size``, never the number of replies) and the noise stay as they
          are, whether it replies or not and whatever it sends.
        * Every round is the private step of training, from clipping to noise (`qclip.training.step`), and is accounted
          for as that: Poisson sampling at ``cohort_size / num_clients``.
        * A round is atomic. An error before its release changes nothing and spends nothing, and the same cohort is
          drawn again.

    The caller's part:
        * The updates of a round are those of the clients of `sample`, each at most once. Nobody else learns who they
          are: the guarantee rests on it. More updates than drawn clients are refused.
        * An update depends on the data of its client, on means released before, and on nothing else of other clients.

    Edge cases:
        * Nobody replies: the release is noise alone, and is charged for.
        * An update with NaN or Inf counts as clipped and adds nothing to the sum. Zeros count as unclipped.
        * An update of another layout (names, shapes, integers) is refused by name; with ``malformed="drop"`` it is a
          client that did not reply.
        * ``noise_multiplier`` 0, or a threshold that sees raw norms: epsilon is infinite after the first round.

    Args:
        like: The tensors of an update by name, for names, shapes, dtypes and the device; or a module, for its trainable
            parameters.
        num_clients: The public number of clients.
        cohort_size: The *expected* number of clients of a round. Each joins with probability
            ``cohort_size / num_clients``, independently.
        rounds: The length of the run.
        epsilon: The privacy budget. Exactly one of ``epsilon`` and ``noise_multiplier``.
        delta: By default ``1 / (10 num_clients)``.
        noise_multiplier: The noise of the sum and the counts together, relative to their sensitivity. 0 means no noise
            at all.
        threshold: The clip norm, or how to learn it. By default the median of the updates' norms, whose count costs 2 %
            of noise. With cohorts of 100 it is found within 20 rounds from 100 times too high or too low.
        groups: The tensors that are clipped together: "flat", "per-layer", or patterns of names.
        sampling: "poisson", or "fixed" (cohorts of one size) without noise.
        accountant: "pld" (tight) or "rdp".
        seed: The seed of cohorts and noise. Leave it out except in tests: whoever knows it can subtract the noise.

    Raises:
        qclip.Refusal: For arguments that are out of bounds or contradict each other.

    >>> import torch
    >>> aggregator = Aggregator(
    ...     {"w": torch.zeros(2)}, num_clients=1000, cohort_size=100, rounds=3, noise_multiplier=1.0, delta=1e-4, seed=0
    ... )
    >>> mean = aggregator.aggregate({"w": torch.ones(2)} for client in aggregator.sample())
    >>> mean["w"].shape, len(aggregator.history), round(aggregator.epsilon(), 2)
    (torch.Size([2]), 1, 1.17)
    """

    def __init__(
        self,
        like: Update | nn.Module,
        *,
        num_clients: int,
        cohort_size: int,
        rounds: int,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        threshold: Threshold[Any] = MEDIAN,
        groups: GroupSpec = "flat",
        sampling: Sampling = "poisson",
        accountant: Accountant = "pld",
        seed: int | None = None,
    ) -> None:
        self._layout = Layout.of(like, groups)
        if threshold.raw_access == "dataset":
            remedy = 'take ExactQuantile(p, over="batch"), or a private threshold such as qclip.PrivateQuantile'
            raise check.refuse("threshold", type(threshold).__name__, "one that needs no norms of all clients", remedy)
        self._plan = plan = plan_rounds(
            num_clients,
            cohort_size,
            rounds,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            accountant=accountant,
            sampling=sampling,
            private=threshold.private,
        )
        dims = self._layout.dims
        conditions = Conditions(plan.cohort_size, plan.rounds, plan.noise_multiplier, dims)
        threshold.check(conditions)
        self._rule = StepRule(
            threshold=threshold,
            members={Key("gradient", name): group for name, group in self._layout.groups.members.items()},
            dims=dims,
            dtypes={Key("gradient", name): x.dtype for name, x in self._layout.tensors.items()},
            batch_size=plan.cohort_size,
            noise=accounting.split(plan.noise_multiplier, threshold.share(conditions)),
        )
        self._threshold_state = threshold.start(len(dims))
        self._records: list[StepRecord] = []
        self._history = History(self._records)
        self._warned_lost = False
        self._available = plan.num_clients
        self._is_seeded = seed is not None
        self._sampling_seed, noise_seed = np.random.SeedSequence(seed).spawn(2)
        self._noise = NoiseSource(noise_seed)

    @property
    def plan(self) -> RoundPlan:
        """The public constants of the run."""
        return self._plan

    @property
    def threshold(self) -> Threshold[Any]:
        """The threshold, as it was given. `history` has its clip norms."""
        return self._rule.threshold

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups of tensors; each group is clipped together."""
        return self._layout.groups.names

    @property
    def round(self) -> int:
        """The number of rounds done, which is the number of the next one."""
        return len(self._records)

    @property
    def finished(self) -> bool:
        """Whether all rounds of the plan are done. Another one is then refused."""
        return len(self._records) == self._plan.rounds

    @property
    def history(self) -> History:
        """The record of each round: public and released values only. A record's ``step`` is the round, its size 1."""
        return self._history

    @property
    def lost_threshold(self) -> str:
        """The reason and the remedy if the threshold has lost its quantile; otherwise empty. From released values."""
        return explain(self._records, self.threshold, self.groups)

    @property
    def noise_multipliers(self) -> accounting.Split:
        """The noise multipliers of the update sum and of the counts, each relative to its own sensitivity."""
        return self._rule.noise

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """The clip norm of each group in the next round: public, unless the threshold sees raw norms."""
        if not self.threshold.private:
            raise Refusal(
                f"the clip norms of {type(self.threshold).__name__} follow from the norms of the round, and are not "
                "known before; read history after the round"
            )
        return self.threshold.clip_norms(self._threshold_state, self.round)

    def epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon spent so far, for the rounds released; ``delta`` is by default that of the plan."""
        return accounting.epsilon(
            noise_multiplier=self._plan.noise_multiplier if self.threshold.private else 0.0,
            sample_rate=self._plan.sample_rate,
            steps=self.round,
            delta=self._plan.delta if delta is None else delta,
            accountant=self._plan.accountant,
        )

    @property
    def terms(self) -> Terms:
        """What clients that clip their updates themselves need to know in the next round (`answered`): public."""
        self._plan.require_budget(self.round)
        self.clip_norms  # noqa: B018 - refuses a threshold that sees raw norms
        return Terms.of(ask(self._state, self._rule), self._layout.groups.members)

    def sample(self, available: int | None = None) -> NDArray[np.intp]:
        """Return the clients of the next round, ascending; possibly none. Keep them secret.

        A pure function of the seed, the round and ``available``: asked again before the round is released, the answer
        is the same.

        Args:
            available: The number of clients to draw from, where it is not ``num_clients``. Each still joins with
                probability ``cohort_size / num_clients``; that, the noise and the divisor stay as they are planned.
        """
        self._plan.require_budget(self.round)
        self._available = self._plan.num_clients if available is None else check.count("available", available, least=0)
        return self._drawn()

    def _drawn(self) -> NDArray[np.intp]:
        if self._plan.sampling == "fixed":
            size = min(self._plan.cohort_size, self._available)
            return UniformSampler(self._available, size, self._sampling_seed).draw(self.round)
        return PoissonSampler(self._available, self._plan.sample_rate, self._sampling_seed).draw(self.round)

    def aggregate(self, updates: Iterable[Update], *, malformed: Malformed = "refuse") -> dict[str, Tensor]:
        """Release the private mean of a round, in one pass that keeps no update.

        Args:
            updates: The update of each client that replied, each once.
            malformed: What becomes of an update with other names, shapes or dtypes than ``like``: "refuse" for
                updates of one's own making, "drop" for those of clients that are not trusted. A dropped update is one
                that never came: it changes neither the divisor nor anything of another client, and how many there were
                is shown nowhere (the log has it at level DEBUG, which is as raw as the updates).

        Returns:
            The noisy mean by name: the clipped sum plus noise, over the expected cohort.
        """
        check.choice("malformed", malformed, ("refuse", "drop"))
        return self._release(
            lambda query: _each(updates, lambda update: self._sums(self._layout.one(update), query), malformed)
        )

    def aggregate_answered(
        self, replies: Iterable[tuple[Update, Tensor]], *, malformed: Malformed = "refuse"
    ) -> dict[str, Tensor]:
        """Release the private mean of a round, from updates that were clipped at the client (`answered`).

        A client's word is not trusted: its update and its answer are clipped again, to the bounds of the round.

        Args:
            replies: The clipped update and the answer of each client that replied, each once.
            malformed: As in `aggregate`.

        Returns:
            The noisy mean by name.
        """
        check.choice("malformed", malformed, ("refuse", "drop"))
        self.terms  # noqa: B018 - refuses a threshold that sees raw norms
        return self._release(
            lambda query: _each(replies, lambda reply: contribution(*reply, self._layout, query), malformed)
        )

    def aggregate_stacked(self, updates: Update | Iterable[Update]) -> dict[str, Tensor]:
        """Release the private mean of a round, from stacked updates: `aggregate`, many clients at a time.

        Args:
            updates: The updates by name, [M, *shape], of M clients, each once; or an iterable of such stacks. A
                threshold that sees raw norms needs one stack.

        Returns:
            The noisy mean by name.
        """
        stacks = cast(Iterable[Update], [updates] if isinstance(updates, Mapping) else updates)
        return self._release(lambda query: self._stacked(stacks, query))

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last round, as plain data.

        Keep it as secret as the updates until the run is complete: it holds the seed of the cohorts, and with a given
        ``seed`` that of the noise. The state of a complete run holds neither.
        """
        return {
            **self._identity(),
            "execution": None,
            "threshold_state": self._threshold_state,
            "history": [asdict(record) for record in self._records],
            "secrets": None if self.finished else self._secrets(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of a run with the same arguments: the same cohorts, thresholds and epsilon.

        Unless a ``seed`` was given, the noise is drawn afresh. Clients do not repeat their updates bit for bit, and if
        a round that was released after the state was saved is run again, noise that is added to two different sums
        could be subtracted. Such a round costs epsilon twice: save the state before a mean leaves the process.
        """
        checkpoint.require_same_run(state, self._identity(), {}, self.round)
        secrets = state["secrets"]
        if secrets is not None:
            if (secrets["noise"] is None) == self._is_seeded:
                remedy = "make the aggregator with the same seed, or without one as before"
                raise check.refuse("seed", "given" if self._is_seeded else None, "as in the checkpoint", remedy)
            self._sampling_seed = checkpoint.seed_of(secrets["sampling"])
            if secrets["noise"] is not None:
                self._noise.load_state_dict(secrets["noise"])
        self._records[:] = map(record_of, state["history"])  # in place, because `history` is a view of the list
        self._warned_lost = any(record.lost for record in self._records)
        self._threshold_state = state["threshold_state"]

    def _sums(self, stack: Mapping[str, Tensor], query: Query) -> RawSums:
        """Return the sums of a stack of updates."""
        num_clients = len(next(iter(stack.values())))
        return in_float64(raw_sums(self._layout.clipped(stack, query.clip_norms), num_clients, query))

    def _stacked(self, stacks: Iterable[Update], query: Query) -> Iterator[RawSums]:
        for given in stacks:
            stack = self._layout.stack(given)
            yield from (self._sums(piece, query) for piece in ([stack] if query.keep_norms else pieces(stack)))

    def _release(self, sums: Callable[[Query], Iterator[RawSums]]) -> dict[str, Tensor]:
        """Add up what the clients add to the sums of a query, and release and record the total."""
        self._plan.require_budget(self.round)
        query, most, raw = ask(self._state, self._rule), len(self._drawn()), None
        for more in sums(query):
            if raw is not None and query.keep_norms:  # its clip norms follow from the norms of the whole cohort
                remedy = "call aggregate_stacked with one mapping, or take a private threshold such as PrivateQuantile"
                raise check.refuse(
                    "threshold", type(self.threshold).__name__, "private to take updates one after the other", remedy
                )
            if raw is None:
                raw = more
            else:
                raw += more
            if raw.num_examples > most:
                raise check.refuse(
                    "updates",
                    f"more than {most}",
                    f"those of the {most} clients of sample(), each at most once",
                    "aggregate the updates of the drawn clients, which is what epsilon is computed for",
                )
        if raw is None:
            raw = self._sums(self._layout.nothing(), query)
        return self._record(release(self._state, raw.reduced(), query, self._rule, self._noise))

    def _record(self, released: StepRelease) -> dict[str, Tensor]:
        record = StepRecord(
            step=self.round,
            tau=released.clip_norms,
            noisy_unclipped=released.noisy_unclipped,
            step_size=1.0,  # the mean is released as it is
            noise_power=released.noise_power,
            clipped_length=released.clipped_length,
        )
        lost = lost_groups([*self._records[1 - WINDOW :], record], self.threshold, self.groups)
        # Charged before the mean is visible: an interruption between the lines costs budget, not privacy.
        self._records.append(replace(record, lost=lost))
        self._threshold_state = released.state.threshold
        self._available = self._plan.num_clients
        if lost and not self._warned_lost:
            self._warned_lost = True
            warnings.warn(self.lost_threshold, LostThreshold, stacklevel=4)
        return released.noisy_gradient

    @property
    def _state(self) -> StepState:
        return StepState(self.round, self._threshold_state)

    def _identity(self) -> dict[str, Any]:
        return {
            "plan": asdict(self._plan),
            "layout": self._layout.described,
            "threshold": describe(self.threshold),
            "groups": dict(self._layout.groups.members),
            "schedules": checkpoint.sampled(vars(self.threshold), self._plan.rounds),
        }

    def _secrets(self) -> dict[str, Any]:
        return {
            "sampling": checkpoint.seed_state(self._sampling_seed),
            "noise": self._noise.state_dict() if self._is_seeded else None,
        }


def _each(items: Iterable[T], read: Callable[[T], RawSums], malformed: Malformed) -> Iterator[RawSums]:
    """Yield the sums of each client; of a malformed update, nothing or its refusal."""
    for item in items:
        try:
            sums = read(item)
        except Refusal as reason:
            if malformed == "refuse":
                raise
            log.debug("an update was dropped: %s", reason)
            continue
        yield sums

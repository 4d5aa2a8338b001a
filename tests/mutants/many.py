"""Faults of runs on several processes, and of rounds of clients."""

from mutants.mutant import Edit, Mutant

RUN, GROUP, AGGREGATOR = "training/run.py", "training/process_group.py", "federated/aggregator.py"
RANKS, CLIENTS = "training/test_ranks.py::test_two_ranks_are_one", "federated/test_aggregator.py"

MUTANTS = (
    Mutant(
        "each rank adds noise of its own before the sums are added up",
        (
            Edit(
                RUN,
                "        step, released = len(self._records), self._records[-1:]\n",
                "        step, released = len(self._records), self._records[-1:]\n"
                "        if self._ranks.size > 1:\n"
                "            from qclip.training.noise import release as noisy\n\n"
                "            own = noisy(raw.gradient, self._rule.noise.gradient, NoiseSource(self.rank))\n"
                "            raw = replace(raw, gradient=replace(raw.gradient, tensors=own.tensors))\n",
            ),
        ),
        (RANKS,),
    ),
    Mutant(
        "each rank adds other noise to the common sum",
        (
            Edit(
                RUN,
                "        self._noise = NoiseSource(noise_seed)\n",
                "        self._noise = NoiseSource(noise_seed.spawn(ranks.rank + 1)[-1])\n",
            ),
        ),
        (RANKS,),
    ),
    Mutant(
        "no rank adds noise",
        (
            Edit(
                RUN,
                "accounting.split(plan.noise_multiplier, threshold",
                "accounting.split(plan.noise_multiplier if ranks.size == 1 else 0.0, threshold",
            ),
        ),
        (RANKS,),
    ),
    Mutant(
        "the noise is shared out so that one rank's share is missing",
        (
            Edit(
                RUN,
                "accounting.split(plan.noise_multiplier, threshold",
                "accounting.split(plan.noise_multiplier / ranks.size, threshold",
            ),
        ),
        (RANKS,),
    ),
    Mutant(
        "the counts of other ranks are left out",
        (
            Edit(
                GROUP,
                "counts=None if raw.counts is None else self._summed(raw.counts),",
                "counts=raw.counts,",
            ),
        ),
        (RANKS,),
    ),
    Mutant(
        "every rank takes the whole draw",
        (Edit("training/ranks.py", "        return indices[self.rank :: self.size]\n", "        return indices\n"),),
        (RANKS,),
    ),
    Mutant(
        "every rank has a seed of its own",
        (
            Edit(
                "training/ranks.py",
                "np.random.SeedSequence(ranks.first(np.random.SeedSequence(seed).entropy))",
                "np.random.SeedSequence(seed)",
            ),
        ),
        (RANKS,),
    ),
    Mutant(
        "the mean of a round is over those who replied",
        (
            Edit(
                AGGREGATOR,
                "release(self._state, raw.reduced(), query, self._rule, self._noise))",
                "release(\n"
                "            self._state, raw.reduced(), query,\n"
                "            replace(self._rule, batch_size=max(raw.num_examples, 1)), self._noise))",
            ),
        ),
        (f"{CLIENTS}::test_a_round_is_the_private_step",),
    ),
    Mutant(
        "a client that clips its update itself is believed",
        (
            Edit(
                "federated/answers.py",
                '    sums = _bounded(joint, groups | {f"slack {k}": k for k in range(len(slack))}, query.clip_norms)\n',
                "    sums = joint\n",
            ),
        ),
        ("contracts/test_clients.py::test_a_client_that_lies_moves_a_round_by_no_more",),
    ),
    Mutant(
        "the counts that a client sends are believed",
        (
            Edit(
                "federated/answers.py",
                '    bounded = _bounded({"counts": counts}, {"counts": 0}, (count.l2_bound,))["counts"]\n',
                "    bounded = counts\n",
            ),
        ),
        ("contracts/test_clients.py::test_a_client_that_lies_moves_a_round_by_no_more",),
    ),
    Mutant(
        "more updates than drawn clients are taken",
        (Edit(AGGREGATOR, "            if raw.num_examples > most:\n", "            if False:\n"),),
        (f"{CLIENTS}::test_more_updates_than_drawn_clients_are_refused",),
    ),
    Mutant(
        "a round without replies is free",
        (
            Edit(
                AGGREGATOR,
                "        if raw is None:\n            raw = self._sums(self._layout.nothing(), query)\n",
                "        if raw is None:\n"
                "            return {k: x.new_zeros(x.shape, device='cpu') for k, x in self._layout.tensors.items()}\n",
            ),
        ),
        (f"{CLIENTS}::test_epsilon_is_that_of_the_rounds_done",),
    ),
    Mutant(
        "a federated run forgets its threshold when it is restored",
        (Edit(AGGREGATOR, '        self._threshold_state = state["threshold_state"]\n', ""),),
        (f"{CLIENTS}::test_a_resumed_run_is_the_run",),
    ),
)

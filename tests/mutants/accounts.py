"""Faults of accounting, of the plan, and of sampling."""

from mutants.mutant import Edit, Mutant

ACCOUNTING, RUN, PLAN, SAMPLING = "accounting.py", "training/run.py", "training/plan.py", "training/sampling.py"
PRIVATE, OPTIONS, ACCOUNTS = "training/test_private.py", "training/test_private_options.py", "test_accounting.py"

MUTANTS = (
    Mutant(
        "the accountant takes the gradient's multiplier, not the merged one",
        (
            Edit(
                RUN,
                "return self._plan.noise_multiplier if self._rule.threshold.private else 0.0",
                "return self._rule.noise.gradient if self._rule.threshold.private else 0.0",
            ),
        ),
        (f"{OPTIONS}::test_epsilon_is_dp_accountings_and_the_curve_is_never_below",),
        replay="plain",
    ),
    Mutant(
        "the counts are released and not paid for",
        (
            Edit(
                RUN,
                "noise=accounting.split(plan.noise_multiplier, threshold.share(conditions)),",
                "noise=accounting.split(plan.noise_multiplier, threshold.share(conditions))"
                "._replace(gradient=plan.noise_multiplier),",
            ),
        ),
        (f"{PRIVATE}::test_gradient_and_counts_merge_to_the_stated_noise",),
        replay="plain",
    ),
    Mutant(
        "of two releases the accountant sees the louder one",
        (Edit(ACCOUNTING, "total = math.hypot(*inverses)", "total = max(inverses)"),),
        (f"{ACCOUNTS}::test_a_split_merges_to_the_whole_and_never_below",),
    ),
    Mutant(
        "epsilon is read before the step is counted",
        (Edit(RUN, "            steps=len(self._records),\n", "            steps=max(len(self._records) - 1, 0),\n"),),
        (f"{PRIVATE}::test_epsilon_is_that_of_the_steps_done",),
        replay="plain",
    ),
    Mutant(
        "one step is forgotten in the composition",
        (
            Edit(
                ACCOUNTING,
                "return dp_accounting.SelfComposedDpEvent(step, steps)",
                "return dp_accounting.SelfComposedDpEvent(step, max(steps - 1, 1))",
            ),
        ),
        (f"{ACCOUNTS}::test_without_subsampling_it_is_the_gaussian_mechanism",),
    ),
    Mutant(
        "calibration returns the noise that is just too small",
        (Edit(ACCOUNTING, "else (middle, high)\n    return high\n", "else (middle, high)\n    return low\n"),),
        (f"{ACCOUNTS}::test_calibrated_noise_meets_the_target_and_wastes_little",),
    ),
    Mutant(
        "a threshold that reads raw norms calls itself private",
        (Edit("thresholds/rolling_quantile.py", 'return "physical_batch"', 'return "none"'),),
        ("contracts/test_thresholds.py::test_a_private_threshold_does_not_look_at_raw_norms",),
    ),
    Mutant(
        "floor(N q) instead of the batch size that was given",
        (
            Edit(
                RUN,
                "            batch_size=plan.batch_size,\n            noise=",
                "            batch_size=int(dataset_size(source) * plan.sample_rate),\n            noise=",
            ),
        ),
        ("training/test_public_size.py::test_sums_are_divided_by_the_batch_size_whatever_the_length",),
    ),
    Mutant(
        "shuffled batches are accounted for as Poisson",
        (
            Edit(
                SAMPLING,
                "            return np.flatnonzero(generator.random(self.dataset_size) < self.sample_rate)\n",
                "            size = round(self.dataset_size * self.sample_rate)\n"
                "            order = generator_at(self.seed, step // (self.dataset_size // size)).permutation("
                "self.dataset_size)\n"
                "            start = step % (self.dataset_size // size) * size\n"
                "            return np.sort(order[start : start + size])\n",
            ),
        ),
        ("training/test_sampling.py::test_examples_join_independently_with_the_stated_probability",),
    ),
    Mutant(
        "batches of one size are accounted for as Poisson",
        (
            Edit(PLAN, 'if sampling == "uniform" and noise_multiplier != 0:', "if False:"),
            Edit("federated/plan.py", 'if sampling == "fixed" and noise_multiplier != 0:', "if False:"),
        ),
        (
            f"{OPTIONS}::test_uniform_sampling_has_one_batch_size_and_no_privacy",
            "federated/test_aggregator.py::test_a_fixed_cohort_is_never_accounted_for_as_poisson",
        ),
    ),
    Mutant(
        "a run goes on after its plan",
        (Edit(PLAN, "        if step >= self.num_steps:", "        if step > self.num_steps:"),),
        (f"{PRIVATE}::test_a_step_past_the_plan_is_refused_before_any_work",),
    ),
    Mutant(
        "a ledger forgets the runs of tuning",
        (Edit(ACCOUNTING, "        for run in runs:\n", "        for run in runs[-1:]:\n"),),
        ("apps/test_ledger.py::test_equal_runs_cost_what_one_long_run_costs",),
    ),
)

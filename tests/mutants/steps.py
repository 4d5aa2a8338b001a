"""Faults of a step: its sums, its noise, its threshold, the optimizer, checkpoints."""

from mutants.mutant import Edit, Mutant

STEP, SUMS, NOISE, RUN, GUARD = (f"training/{name}.py" for name in ("step", "sums", "noise", "run", "guard"))
PRIVATE, PEERS, RESUME = (f"training/test_{name}.py" for name in ("private", "peers", "resume"))
SOURCE, LOADER = "training/test_noise_source.py", "training/loader.py"
REPLAYED = "contracts/test_replay.py::test_removing_an_example_moves_a_step_by_what_is_accounted_for"
RESUMED = f"{RESUME}::test_a_resumed_run_is_the_run_that_would_have_been"

MUTANTS = (
    # What is released
    Mutant(
        "the sum is divided by the realised batch size",
        (
            Edit(
                STEP,
                "divisor = rule.batch_size * scale",
                "divisor = max(raw.num_examples, 1) * scale",
            ),
        ),
        (f"{PRIVATE}::test_sums_are_divided_by_the_expected_batch_size",),
    ),
    Mutant(
        "the counts are divided by the realised batch size",
        (Edit("training/answer.py", "    B = batch_size\n", "    B = max(raw.num_examples, 1)\n"),),
        (f"{PEERS}::test_counts_are_divided_by_the_expected_batch_size",),
        replay="plain",
    ),
    Mutant(
        "the bit of an unclipped example is not centred",
        (Edit(SUMS, " - count.centre * num_examples\n", "\n"),),
        (REPLAYED,),
        replay="paid",
    ),
    Mutant(
        "the counted value is a norm, not a bit",
        (
            Edit(
                SUMS,
                "cumulative = clipped.count_under(count.radii).float()",
                "cumulative = clipped.group_norms.sum(0)[:, None] + clipped.count_under(count.radii).float()",
            ),
        ),
        (REPLAYED,),
        replay="paid",
    ),
    Mutant(
        "the counts get no noise",
        (
            Edit(
                STEP,
                "mechanism(raw.counts, rule.noise.counts, source)",
                "mechanism(raw.counts, 0.0, source)",
            ),
        ),
        (REPLAYED,),
        replay="paid",
    ),
    Mutant(
        "the threshold moves by exact counts of the batch",
        (
            Edit(
                STEP,
                "    answered = answer(noisy, counts, raw,",
                "    if counts is not None:\n"
                "        counts = NoisySum(raw.counts.tensors, counts.stds)\n"
                "    answered = answer(noisy, counts, raw,",
            ),
        ),
        (REPLAYED,),
        replay="paid",
    ),
    Mutant(
        "the threshold of a step is a quantile of its own batch",
        (
            Edit(
                RUN,
                "        if self._logical is None or ticket.position == 0:\n",
                "        if self._rule.threshold.private and ticket.position == 0:\n"
                "            seen = [float(x.double().norm()) for x in leaves(batch) if x.is_floating_point()]\n"
                "            self._threshold_state = _raw_state(self._threshold_state, seen[0])\n"
                "        if self._logical is None or ticket.position == 0:\n",
            ),
            Edit(
                RUN,
                "def _mean_loss(",
                "def _raw_state(state, norm):\n"
                '    return tuple(group | {"tau": 0.01 * norm} if isinstance(group, dict) else 0.01 * norm'
                " for group in state)\n\n\n"
                "def _mean_loss(",
            ),
            Edit(
                RUN,
                "import torch\nfrom torch import",
                "import torch\nfrom qclip.engine.batch import tensor_leaves as leaves\nfrom torch import",
            ),
        ),
        (REPLAYED,),
        replay="paid",
    ),
    Mutant(
        "noise is scaled by the next threshold",
        (
            Edit(
                STEP,
                "    updated = rule.threshold.update(state.threshold, state.step, answered)\n",
                "    updated = rule.threshold.update(state.threshold, state.step, answered)\n"
                "    if rule.threshold.private:\n"
                "        from dataclasses import replace\n\n"
                "        norms = rule.threshold.clip_norms(updated, state.step + 1)\n"
                "        ahead = replace(raw.gradient, group_bounds=norms)\n"
                "        noisy = mechanism(\n"
                "            ahead, rule.noise.gradient, source, divisor=divisor, dtypes=dtypes, places=places\n"
                "        )\n",
            ),
        ),
        (f"{PEERS}::test_the_threshold_stays_within_a_logical_batch_and_scales_its_noise",),
        replay="paid",
    ),
    Mutant(
        "the threshold is told the sign the wrong way round",
        (
            Edit(
                "thresholds/private_quantile.py",
                "error = plausible(fraction, std) - p",
                "error = p - plausible(fraction, std)",
            ),
        ),
        ("contracts/test_thresholds.py::test_it_finds_the_true_quantile_from_both_sides",),
    ),
    Mutant(
        "an adaptive threshold counts the last physical batch only",
        (Edit(SUMS, "            counts += other.counts\n", "            counts = other.counts\n"),),
        (f"{PEERS}::test_adaptive_thresholds_count_every_physical_batch",),
    ),
    Mutant(
        "an empty draw leaves the threshold as it is, without noise",
        (
            Edit(
                STEP,
                "    updated = rule.threshold.update(state.threshold, state.step, answered)\n",
                "    updated = rule.threshold.update(state.threshold, state.step, answered)\n"
                "    updated = updated if raw.num_examples else state.threshold\n",
            ),
        ),
        (f"{PEERS}::test_an_empty_batch_is_a_step",),
    ),
    Mutant(
        "the free count rides outside of the clipped vector",
        (
            Edit(
                "thresholds/threshold.py",
                "(1 - ROUNDING_MARGIN) * tau)) for radii",
                "1.5 * tau)) for radii",
            ),
        ),
        ("contracts/test_thresholds.py::test_one_example_with_its_slack_is_no_longer_than_the_threshold",),
        replay="paid",
    ),
    # Noise
    Mutant(
        "the noise does not follow the clip norm",
        (
            Edit(
                NOISE,
                "group_noise(value.group_bounds, value.group_dims, noise_multiplier)",
                "group_noise((1.0,) * len(value.group_bounds), value.group_dims, noise_multiplier)",
            ),
        ),
        ("training/test_noise.py::test_the_standard_deviation_is_the_multiplier_times_the_bound",),
        replay="paid",
    ),
    Mutant(
        "noise is added for each physical batch",
        (
            Edit(
                RUN,
                "        raw = logical.add(gradients, ticket.num_examples, last=ticket.last)\n",
                "        if not ticket.last:\n"
                "            for x in gradients.sums.values():\n"
                "                x += gradients.clip_norms[0] * self._rule.noise.gradient * torch.randn(x.shape)\n"
                "        raw = logical.add(gradients, ticket.num_examples, last=ticket.last)\n",
            ),
        ),
        (f"{PRIVATE}::test_doors_and_physical_batches_do_not_change_the_run",),
    ),
    Mutant(
        "who holds part of a group adds the noise of that part",
        (
            Edit(
                NOISE,
                "group_noise(value.group_bounds, value.group_dims, noise_multiplier)",
                "group_noise(value.group_bounds, group_dims(value.tensors, value.members, len(value.group_bounds)),"
                " noise_multiplier)",
            ),
        ),
        ("training/test_noise.py::test_who_holds_part_of_the_coordinates_adds_the_noise_of_all",),
    ),
    Mutant(
        "noise comes from a seeded global generator",
        (
            Edit(
                NOISE,
                "normal = stream(number).standard_normal(pieces[-1].stop)",
                "normal = np.random.standard_normal(pieces[-1].stop)",
            ),
        ),
        ("training/test_noise.py::test_it_never_touches_the_global_streams",),
    ),
    Mutant(
        "noise without a seed follows from a constant",
        (Edit("training/ranks.py", "np.random.SeedSequence(seed).entropy", "(42 if seed is None else seed)"),),
        (f"{SOURCE}::test_runs_have_keys_of_their_own",),
    ),
    Mutant(
        "two draws share their random numbers",
        (Edit(NOISE, "        self._draws += 1\n", ""),),
        (f"{SOURCE}::test_gradients_and_counts_have_draws_of_their_own",),
    ),
    Mutant(
        "the noise is rounded before it is added",
        (
            Edit(
                NOISE,
                "            values += np.multiply(raw_array[here], scale / spacings[k], dtype=np.float64)\n"
                "            values += 0.5\n            np.floor(values, out=values)\n",
                "            values += 0.5\n            np.floor(values, out=values)\n"
                "            values += np.multiply(raw_array[here], scale / spacings[k], dtype=np.float64)\n",
            ),
        ),
        ("training/test_noise.py::test_released_values_lie_on_a_grid_that_the_sum_does_not_move",),
    ),
    # The optimizer
    Mutant(
        "a raw gradient is applied",
        (
            Edit(
                GUARD,
                "            if released is None:\n                raise self._refusal(parameter)\n            due",
                "            if released is None:\n                continue\n            due",
            ),
        ),
        ("training/test_guard.py::test_a_habitual_backward_is_refused",),
        replay="raw gradient",
    ),
    Mutant(
        "a released gradient is applied twice",
        (Edit(GUARD, "grad is None or released.is_applied(parameter) or", "grad is None or"),),
        ("training/test_guard.py::test_a_released_gradient_is_applied_once",),
    ),
    Mutant(
        "a released gradient may be changed",
        (Edit(GUARD, " or grad._version != released.version:", ":"),),
        ("training/test_guard.py::test_a_changed_gradient_is_refused",),
    ),
    Mutant(
        "a batch may be used twice",
        (Edit(LOADER, "        if ids & _alive(self._spent):\n", "        if False:\n"),),
        (f"{PRIVATE}::test_a_batch_is_used_once",),
    ),
    Mutant(
        "an error inside a logical batch keeps its partial sum",
        (
            Edit(
                RUN,
                "        except BaseException as error:\n            self._logical = None\n",
                "        except BaseException as error:\n",
            ),
            Edit(RUN, "if self._logical is None or ticket.position == 0:", "if self._logical is None:"),
            Edit(RUN, "        position = self._logical.num_batches\n", "        position = ticket.position\n"),
        ),
        (f"{PRIVATE}::test_an_error_inside_a_logical_batch_costs_nothing",),
    ),
    Mutant(
        "the gradient is visible before the step is charged",
        (
            Edit(RUN, "        self._records.append(replace(record, lost=lost))\n", ""),
            Edit(
                RUN,
                "self._shards.part(name, gradient) for name, gradient in gradients.items()})\n",
                "self._shards.part(name, gradient) for name, gradient in gradients.items()})\n"
                "        self._records.append(replace(record, lost=lost))\n",
            ),
        ),
        (
            "training/test_certificate.py::test_a_release_that_was_interrupted_before_its_gradient_was_written_is_refused",
        ),
    ),
    # Checkpoints
    Mutant(
        "a checkpoint forgets the threshold",
        (Edit(RUN, '        self._threshold_state = state["threshold_state"]\n', ""),),
        (f"{PEERS}::test_the_threshold_is_in_the_checkpoint", RESUMED),
    ),
    Mutant(
        "a checkpoint forgets the generator of the noise",
        (Edit(RUN, '            self._noise.load_state_dict(secrets["noise"])\n', "            pass\n"),),
        (RESUMED,),
    ),
    Mutant(
        "a checkpoint forgets the sampling",
        (Edit(RUN, '        self.loader.reseed(checkpoint.seed_of(secrets["sampling"]))\n', ""),),
        (RESUMED,),
    ),
    Mutant(
        "a checkpoint forgets what was spent",
        (Edit(RUN, '        self._records[:] = map(record_of, state["history"])', "        pass"),),
        (RESUMED,),
    ),
    Mutant(
        "a run goes on with other data under the same noise",
        (
            Edit(
                RUN,
                '            self._data.require_same(checkpoint.seed_of(secrets["sampling"]), secrets["data"])\n',
                "            pass\n",
            ),
        ),
        (f"{RESUME}::test_changed_data_are_refused_and_nothing_is_touched",),
    ),
    Mutant(
        "the checkpoint of a complete run keeps the seed",
        (Edit(RUN, '"secrets": None if self.finished else self._secrets(),', '"secrets": self._secrets(),'),),
        (f"{RESUME}::test_a_complete_run_keeps_no_secrets_and_cannot_go_on",),
    ),
    # Raw values that leave
    Mutant(
        "the raw loss is written to the log",
        (
            Edit(
                "integrations/release_log.py",
                "        if not self._shows_loss:\n",
                "        if False:\n",
            ),
        ),
        ("integrations/test_tensorboard.py::test_the_raw_loss_is_written_only_when_asked_for_by_name",),
    ),
)

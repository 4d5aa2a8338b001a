"""The holes that an attack by hand has found once, each reopened."""

from mutants.mutant import Edit, Mutant

CHECKS, CONSTANTS, PROVER = "engine/capture/checks.py", "engine/capture/constants.py", "engine/proof/prover.py"
MAKE, NOISE, BATCH = "training/make.py", "training/noise.py", "training/batch_proof.py"
FETCHED, CONSTANT = "training/test_batch_proof.py", "engine/test_constants.py"

MUTANTS = (
    Mutant(
        "hole 1: collate functions are not proven",
        (Edit(BATCH, "        if not self.runs_the_model:\n            return\n", "        return\n"),),
        (f"{FETCHED}::test_a_collate_function_that_mixes", f"{FETCHED}::test_padding_that_the_model_sees"),
        replay="1: a collate function pads to the longest",
    ),
    Mutant(
        "hole 1: what the loop does to a batch is not compared with it",
        (
            Edit(BATCH, "        leaf_origins = origins(used, loaded)\n        if not", "        if not"),
            Edit(
                BATCH,
                "        used_leaves, structure = pytree",
                "        leaf_origins = origins(used, loaded)\n        used_leaves, structure = pytree",
            ),
        ),
        (f"{FETCHED}::test_what_a_loop_computes_from_a_batch",),
        replay="1: the loop standardises by the batch",
    ),
    Mutant(
        "hole 2: all noise follows from 32 bits",
        (Edit(NOISE, "self._key: int = low | high << 64", "self._key: int = (low | high << 64) % 2**32"),),
        ("training/test_noise_source.py::test_without_a_seed_every_bit_of_the_key_is_drawn",),
    ),
    Mutant(
        "hole 3: a buffer that switches mixing on is neither moved in proofs nor watched",
        (
            Edit(PROVER, "perturbed(engine.parameters.values(), constants)", "perturbed(engine.parameters.values())"),
            Edit(CONSTANTS, "        return list(self._left(constants))", "        return []"),
        ),
        (f"{CONSTANT}::test_a_term_whose_weight_is_still_zero", f"{CONSTANT}::test_a_switch_in_a_buffer"),
        replay="3: a buffer switches centring on",
    ),
    Mutant(
        "hole 4: the last bits of a release are those of the sum",
        (
            Edit(
                NOISE,
                "            values += 0.5\n            np.floor(values, out=values)\n"
                "            values *= spacings[k]\n"
                "            noisy_array[here] = values\n",
                "            values *= spacings[k]\n"
                "            values -= raw_array[here] * scale\n"
                "            noisy_array[here] = raw_array[here] * np.float32(scale) + values.astype(np.float32)\n",
            ),
        ),
        ("training/test_noise.py::test_the_last_bits_do_not_tell_whether_someone_was_there",),
    ),
    Mutant(
        "hole 5: outputs may be changed in place before the loss",
        (
            Edit(
                "engine/capture/forward_hooks.py",
                "        if any(leaf._version != version for leaf, version in self._versions):\n",
                "        if False:\n",
            ),
        ),
        ("engine/test_watch.py::test_outputs_overwritten_before_the_loss",),
        replay="5: outputs are centred in place",
    ),
    Mutant(
        "hole 6: a resumed run is cut otherwise under the same noise",
        (Edit("training/checkpoint.py", "        if execution[name] != value:\n", "        if False:\n"),),
        ("training/test_resume.py::test_random_numbers_of_the_forward_pass_are_not_drawn_otherwise",),
    ),
    Mutant(
        "hole 7: proofs tolerate a hundredth of the others",
        (
            Edit(
                PROVER,
                "        if run.batch_size > 1 and any(map(is_rough, run.capture.sites)):\n",
                "        if False:\n",
            ),
            Edit(
                "engine/proof/proof.py",
                "        large = _with_large_others(subject, plans, is_kept) if subject.can_grow else None\n",
                "        large = None\n",
            ),
        ),
        (
            "engine/test_tolerance.py::test_a_little_of_the_others_in_float32",
            "engine/test_tolerance.py::test_a_little_of_the_others_in_16_bits",
        ),
        replay="7: a thousandth of the others",
    ),
    Mutant(
        "hole 8: the sampling rate follows the true number of examples",
        (
            Edit(
                "training/run.py",
                "plan.batch_size, plan.sample_rate, sampling_seed)",
                "plan.batch_size, plan.batch_size / dataset_size(source), sampling_seed)",
            ),
        ),
        ("training/test_public_size.py::test_examples_join_at_the_public_rate_whatever_the_length",),
    ),
    Mutant(
        "hole 9: writes through .data are not seen",
        (
            Edit(
                CHECKS,
                "x._version == version and (value is None or constants.same(value, constants.values(x))):\n",
                "x._version == version:\n",
            ),
        ),
        (f"{CONSTANT}::test_what_the_data_do_to_a_constant",),
        replay="9: a frozen parameter keeps the mean",
    ),
    Mutant(
        "hole 9: the buffers of a criterion are not watched",
        (
            Edit(
                CHECKS,
                "        yield from ((CRITERION + name, x) for name, x in named_tensors(criterion))\n",
                "        yield from ()\n",
            ),
        ),
        (f"{CONSTANT}::test_a_criterion_that_keeps_what_the_data_did",),
        replay="9: a criterion keeps the mean",
    ),
    Mutant(
        "hole 9: an example may be in a Subset many times",
        (Edit(MAKE, "        refuse_repeated(dataset_of(dataset))\n", "        pass\n"),),
        ("training/test_dataset.py::test_an_item_that_comes_several_times_is_refused",),
    ),
    Mutant(
        "hole 9: a second run on a model says nothing",
        (Edit(MAKE, "        warn_of_earlier(engine.model)\n", "        pass\n"),),
        ("training/test_private.py::test_a_model_can_be_made_private_again_and_is_told_that_the_cost_adds_up",),
    ),
    Mutant(
        "hole 9: epsilon at a tiny delta has no rounding margin",
        (Edit("accounting.py", "_ROUNDING: Final = 2e-15\n", "_ROUNDING: Final = 0.0\n"),),
        ("test_accounting.py::test_no_delta_is_too_small_for_an_upper_bound",),
    ),
    Mutant(
        "hole 9: clipped gradients have no rounding margin",
        (Edit("engine/gradients/clipping.py", "MARGIN: Final = 16\n", "MARGIN: Final = 0\n"),),
        ("engine/test_rounding.py::test_no_example_adds_more_than_its_bound",),
    ),
)

"""Faults of per-example clipping: what is clipped, by which norm, and which examples count."""

from mutants.mutant import Edit, Mutant

CLIPPING, FORMS, RESULT = "engine/gradients/clipping.py", "engine/gradients/forms.py", "engine/result.py"
CLIPPED, PEERS, PROVEN = "engine/test_clipping.py", "engine/test_peers.py", "engine/test_plan.py"

MUTANTS = (
    Mutant(
        "nothing is clipped",
        (
            Edit(
                CLIPPING,
                "        factor = (limits[k] / scaled).clamp(max=1)\n",
                "        factor = torch.ones_like(scaled)\n",
            ),
        ),
        (f"{PEERS}::test_a_huge_example_is_clipped",),
        replay="plain",
        audit="white box",
    ),
    Mutant(
        "the lookups of an embedding are left out of the norm",
        (
            Edit(
                FORMS,
                "        squares = square_sums(summed.view(batch_size, entries * rows.shape[1]))\n",
                "        squares = 0 * square_sums(summed.view(batch_size, entries * rows.shape[1]))\n",
            ),
        ),
        ("engine/test_forms.py::test_rows",),
    ),
    Mutant(
        "the biases are left out of the norm",
        (
            Edit(
                CLIPPING,
                "        squares[bundle.group].append(Squares.exact(square_sums(bundle.rows)))\n",
                "        squares[bundle.group].append(Squares.exact(0 * square_sums(bundle.rows)))\n",
            ),
        ),
        (f"{PEERS}::test_layer_norm_without_bias", "engine/test_shapes.py::test_layer_norm"),
    ),
    Mutant(
        "a repeated word counts once for each time in the norm, not together",
        (
            Edit(
                FORMS,
                "        segments[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)\n",
                "        segments[:, 1:] = torch.arange(1, entries, device=ids.device)\n",
            ),
        ),
        ("engine/test_forms.py::test_rows",),
    ),
    Mutant(
        "tied weights count twice: the norms of both uses without their cross term",
        (Edit(FORMS, "    norms = own + rows + 2 * (cross + error * sizes)\n", "    norms = own + rows\n"),),
        (f"{PEERS}::test_tied_weights_contribute_no_more_than_the_threshold", "engine/test_forms.py::test_join"),
    ),
    Mutant(
        "tied weights count once: the last use is left out of the sum",
        (
            Edit(
                CLIPPING,
                "        total = value if total is None else total + value\n",
                "        total = value if total is None else total\n",
            ),
        ),
        (f"{PEERS}::test_tied_weights_are_accepted",),
    ),
    Mutant(
        "a layer that is used twice is clipped for its first use",
        (
            Edit(
                FORMS,
                "    return Outer(torch.cat(lefts, 2), torch.cat(rights, 2), forms[0].shape)\n",
                "    return Outer(lefts[0], rights[0], forms[0].shape)\n",
            ),
        ),
        (
            "engine/test_forms.py::test_join_of_grouped_products",
            "engine/test_explain.py::test_a_layer_used_twice_is_counted",
        ),
    ),
    Mutant(
        "an example with NaN adds to the sum",
        (
            Edit(
                CLIPPING,
                "        factors.append(torch.where(is_kept, factor, 0))\n",
                "        factors.append(torch.where(norms.is_counted, factor, 0))\n",
            ),
        ),
        (f"{CLIPPED}::test_an_example_that_is_not_finite_in_one_group_has_factor_zero_in_all",),
    ),
    Mutant(
        "NaN counts as unclipped",
        (
            Edit(
                RESULT,
                "((norms <= bounds) & norms.isfinite() & self.mask",
                "(((norms <= bounds) | ~norms.isfinite()) & self.mask",
            ),
        ),
        ("engine/test_result.py::test_non_finite_examples_are_not_counted",),
    ),
    Mutant(
        "padding is counted as an example below the threshold",
        (Edit(RESULT, " & norms.isfinite() & self.mask[:, None, None])", " & norms.isfinite())"),),
        ("engine/test_result.py::test_masked_examples_are_not_counted",),
    ),
    Mutant(
        "padding adds its gradient",
        (
            Edit(CLIPPING, "    is_usable = is_finite & is_counted\n", "    is_usable = is_finite\n"),
            Edit(
                CLIPPING,
                "is_kept = norms.is_counted if assume_finite else",
                "is_kept = norms.is_finite if assume_finite else",
            ),
        ),
        (f"{CLIPPED}::test_a_masked_example_has_factor_zero",),
    ),
    Mutant(
        "the bound of several groups is that of the largest",
        (Edit("engine/groups.py", "    return math.hypot(*group_bounds)", "    return max(group_bounds)"),),
        ("engine/test_groups.py::test_the_bound_is_the_norm_of_the_clip_norms",),
    ),
    Mutant(
        "rows of an example are clipped one by one",
        (
            Edit(
                "training/rows.py",
                "        return losses.unflatten(0, (num_examples, rows)).mean(1)",
                "        return losses.unflatten(0, (num_examples, rows)).sum(1)",
            ),
        ),
        ("training/test_private_options.py::test_the_rows_of_an_example_are_averaged_before_clipping",),
    ),
    Mutant(
        "a loss that divides by the weights of the batch is split as if it did not",
        (Edit("training/losses.py", "        _refuse_coupled_means(criterion)\n", "        pass\n"),),
        ("training/test_losses.py::test_what_is_not_exact_is_refused",),
    ),
    Mutant(
        "examples that mix are not looked for",
        (
            Edit(
                "engine/proof/proof.py",
                "    if subject.batch_size > 1:\n        plans = _require_separation",
                "    if False:\n        plans = _require_separation",
            ),
        ),
        (
            "engine/test_refusals.py::test_values_that_mix_without_gradient",
            f"{PROVEN}::test_any_two_losses_that_mix_are_told_apart",
        ),
    ),
    Mutant(
        "a stale compiled graph is used in the other mode",
        (Edit("engine/compiled/driver.py", "        kinds = (flags, *[", "        kinds = ((), *["),),
        ("engine/test_graph.py::test_the_training_flag_of_one_module_makes_another_graph",),
    ),
    Mutant(
        "a stale compiled graph is used for another number in the batch",
        (
            Edit(
                "engine/compiled/driver.py",
                "if isinstance(x, Tensor) else (type(x), x) for x in leaves",
                "if isinstance(x, Tensor) else type(x) for x in leaves",
            ),
        ),
        ("engine/test_graph.py::test_a_number_in_the_batch_is_frozen",),
    ),
)

"""The tables of ``qclip plan``."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qclip import theory
from qclip.apps.report import words
from qclip.training.advice import DROWNED, MORE_SIGNAL, Change
from qclip.training.plan import PrivatePlan

SHRINKS = {
    "optimisation": "more steps, larger step size",
    "variance": "smaller step size, larger batch",
    "bias": "less clipping",
}


def print_private(console: Console, plan: PrivatePlan, *, recommended: bool) -> None:
    """Print the plan of the privacy: noise, thresholds, the call of `make_private`, and epsilon by epoch."""
    if recommended:
        training = plan.training
        console.print(
            f"Recommended: batch size {training.batch_size:,} for {training.num_steps:,} steps, "
            f"{training.num_steps * training.sample_rate:.3g} epochs.",
            highlight=False,
        )
    _print_noise(console, plan)
    _print_thresholds(console, plan)
    spent = Table(title="Epsilon spent", title_justify="left")
    for column in ("epochs", "steps", "epsilon"):
        spent.add_column(column, justify="right")
    for row in plan.spent:
        spent.add_row(f"{row.epochs:.4g}", f"{row.steps:,}", words.epsilon(row.epsilon, 4))
    console.print(spent)


def _print_noise(console: Console, plan: PrivatePlan) -> None:
    training, option = plan.training, plan.recommended
    table = Table(title="Privacy", show_header=False, title_justify="left")
    table.add_row("epsilon, delta", f"{words.epsilon(plan.spent[-1].epsilon, 4)}, {training.delta:.3g}")
    table.add_row(
        "sampling rate", f"{training.sample_rate:.4g}   ({training.batch_size:,} of {training.dataset_size:,})"
    )
    table.add_row("steps", f"{training.num_steps:,}   ({training.steps_per_epoch:,} an epoch)")
    table.add_row("noise multiplier z", f"{training.noise_multiplier:.4g}   (gradient and counts together)")
    if option is not None:
        table.add_row("noise of the gradient", f"{option.gradient_noise:.4g}   (std, times the threshold, on the sum)")
    if plan.dim > 1:
        norm = plan.relative_noise
        share = f"{norm:.3g}   (norm, in thresholds; the clipped mean has norm at most 1)"
        table.add_row("noise of the mean gradient", share)
        table.add_row("S", f"{norm**2:.3g}   (its square)")
    console.print(table)


def _print_thresholds(console: Console, plan: PrivatePlan) -> None:
    table = Table(title="Adaptive thresholds", title_justify="left")
    table.add_column("threshold")
    for column in ("works", "gradient noise", "count noise", "of the batch"):
        table.add_column(column, justify="right")
    for option in plan.options:
        noise = option.count_noise
        counts = ("free", "") if noise is None else (f"{noise:.3g}", f"{noise / plan.training.batch_size:.1%}")
        works = "yes" if option.feasible else "no"
        table.add_row(option.code, works, f"{option.gradient_noise:.4g}", *counts)
    console.print(table)
    for option in plan.options:
        if not option.feasible:
            console.print(f"- {option.name}: {escape(option.refusal)}", highlight=False)
    if plan.recommended is None:
        advice = "None works here: raise the batch size or epsilon, or take a constant one, Constant(tau)."
        console.print(advice, highlight=False)
    else:
        console.print(f"Take {plan.recommended.code}: {_call(plan)}", highlight=False)


def _call(plan: PrivatePlan) -> str:
    training, option = plan.training, plan.recommended
    assert option is not None
    if training.steps_per_pass == training.num_steps:
        length = f"steps={training.num_steps}"
    else:
        length = f"epochs={training.num_steps // training.steps_per_pass}"
    given = training.epsilon
    budget = f"noise_multiplier={training.noise_multiplier:.6g}" if given is None else f"epsilon={given:g}"
    return (
        f"qclip.make_private(..., batch_size={training.batch_size}, {length}, {budget}, delta={training.delta:.6g}, "
        f"threshold=qclip.{option.code})"
    )


def print_changes(console: Console, changes: Sequence[Change]) -> None:
    """Print how noise, bound, learning rate and cost move with the choices of a plan."""
    table = Table(title="What if?", title_justify="left")
    table.add_column("change")
    for column in ("z", "z/B", "S", "bound x", "lr x", "cost x"):
        table.add_column(column, justify="right")
    for change in changes:
        new = change.outlook
        numbers = (new.noise_multiplier, new.noise_std, new.squared_noise)
        factors = (change.bound, change.step_size, change.cost)
        table.add_row(change.name, *(f"{x:.3g}" for x in numbers), *(f"{x:.2f}" for x in factors))
    console.print(table)
    lines = [
        "z/B is the noise on each coordinate of the mean gradient, in thresholds; S = params (z/B)^2.",
        "The bound, and the learning rate at which it is least, are those of steps with rescale_to_unit_norm=True.",
    ]
    if changes[0].outlook.squared_noise > DROWNED:
        lines.append(f"The noise drowns the gradient: {MORE_SIGNAL}.")
    for line in lines:
        console.print(f"- {line}", highlight=False)


def print_theory(console: Console, best: theory.Plan, coupled: theory.CoupledPlan, moves: list[theory.Move]) -> None:
    """Print the plan of the bound: step size and quantile, their guarantee, and the reasons."""
    _print_choice(console, best)
    _print_terms(console, best.bound)
    motion = Table(title="How the optimum moves", title_justify="left")
    for column in ("with", "step size x", "clipped fraction x", "bound x"):
        motion.add_column(column, justify="left" if column == "with" else "right")
    for move in moves:
        motion.add_row(move.change, f"{move.step_size:.2f}", f"{move.clipped_fraction:.2f}", f"{move.bound:.2f}")
    console.print(motion)
    for line in _reasoning(best):
        console.print(f"- {line}", highlight=False)
    console.print("- For an unknown number of steps:", highlight=False)
    console.print(f"  {_schedules(best, coupled)}", highlight=False)


def _print_choice(console: Console, best: theory.Plan) -> None:
    bound = best.bound
    table = Table(title="The plan", show_header=False, title_justify="left")
    table.add_row("steps T", f"{best.steps:,}")
    table.add_row("step size gamma", f"{best.gamma:.4g}   (the theorem holds below {best.max_step:.4g})")
    table.add_row("quantile p", f"{best.p:.6g}   ({1 - best.p:.3g} of the examples clipped)")
    table.add_row("beta, c", f"{bound.beta:.3g}, {bound.c:.3g}   (they follow)")
    if best.noise_multiplier:
        table.add_row("noise multiplier z", f"{best.noise_multiplier:.4g}   (std z tau on the clipped sum)")
        table.add_row("batch size, dimension", f"{best.batch_size:g}, {best.dim:,}   ({best.sampling} sampling)")
    console.print(table)


def _print_terms(console: Console, bound: theory.Bound) -> None:
    terms = Table(title="The bound on the mean of E||grad f||^2", title_justify="left")
    for column in ("term", "value", "share", "shrinks with"):
        terms.add_column(column, justify="right" if column in ("value", "share") else "left")
    for name, reason in SHRINKS.items():
        value = getattr(bound, name)
        terms.add_row(name, f"{value:.4g}", f"{value / bound.total:.0%}", reason)
    terms.add_row("total", f"{bound.total:.4g}", "", f"one run stays below {bound.one_run():.3g} with probability 95 %")
    console.print(terms)


def _reasoning(best: theory.Plan) -> list[str]:
    share = getattr(best.bound, best.bound.dominant) / best.bound.total
    name = best.bound.dominant
    lines = [
        f"The {name} term dominates." if share > 0.5 else f"The terms are balanced; the {name} term is the largest."
    ]
    if best.at_edge:
        lines.append(
            "The bound favours no clipping: p is at its limit, one clipped example in the whole run. Clipping pays off "
            "for heavier tails (q < 2) over longer runs, and for privacy."
        )
    elif best.noise_multiplier:
        lines.append(
            "Clipping more (a smaller p) lowers the threshold and with it the noise; clipping less lowers the bias. p "
            "balances the two. Keep p constant: with p -> 1 the threshold and the noise would grow."
        )
    else:
        lines.append("Clipping more lowers the variance of heavy tails, clipping less the bias; p balances the two.")
    if best.privacy:
        lines.append(
            "At a fixed budget the noise grows with the steps, so more steps stop helping; more examples do help."
        )
    return lines


def _schedules(best: theory.Plan, coupled: theory.CoupledPlan) -> str:
    step_size, clipped = f"{coupled.step_size:.4g}", coupled.clipped_fraction
    if coupled.constant_p:
        choice = f"gamma_t = {step_size} (t+1)^(-1/2), p = {1 - clipped:.4g} constant"
    else:
        choice = f"qclip.schedules.coupled({best.assumptions.q:g}, {step_size}, {clipped:.4g})"
    return f"{choice}; bound {coupled.bound.total:.4g} after {best.steps:,} steps"

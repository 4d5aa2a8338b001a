"""The ``qclip`` command."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qclip import __version__, theory
from qclip import _validate as check


@dataclass(frozen=True)
class Reproduce:
    """Run every claim of the paper and of docs/theory.md; write claims.json, figures and report.html."""

    out: Path = Path("out/reproduce")
    """Where to write."""
    quick: bool = False
    """Smaller experiments: about a minute instead of about five."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Id of a claim to run (repeat it, or separate ids by commas); all claims when left out."""

    def run(self, console: Console) -> int:
        """Run the claims; fail when one of them fails."""
        try:
            from qclip.experiments.reproduce import reproduce, summary
        except ModuleNotFoundError as missing:
            console.print(f"[red]error:[/] {missing.name} is not installed; pip install 'qclip\\[reproduce]'")
            return 2
        only = [name.strip() for given in self.only for name in given.split(",")]
        rows = reproduce(self.out, quick=self.quick, only=only, console=console)
        console.print(summary(rows))
        console.print(f"report: {self.out / 'report.html'}")
        return 1 if any(row.outcome.verdict == "fails" for row in rows) else 0


@dataclass(frozen=True)
class Plan:
    """Choose the step size and the quantile that minimise the bound, and say why."""

    L: Annotated[float, tyro.conf.arg(name="L")]
    """Smoothness of the objective."""
    sigma: float
    """Bound on the q-th moment of the gradient noise, (E||g - grad f||^q)^(1/q)."""
    gap: float
    """f(x0) - inf f."""
    q: float = 2.0
    """The moment that is bounded, in (1, 2]."""
    steps: int | None = None
    """Length of the run."""
    target: float | None = None
    """Instead of steps: the mean of E||grad f||^2 to reach."""
    batch_size: float = 1.0
    """Expected examples per step."""
    dim: int = 1
    """Number of trainable parameters (matters with noise)."""
    noise_multiplier: float = 0.0
    """Noise of a private run, relative to the clipped sum's sensitivity."""
    epsilon: float | None = None
    """Instead of the noise multiplier: a privacy budget, with --examples."""
    delta: float | None = None
    """Of the budget; 1/(10 examples) when left out."""
    examples: int | None = None
    """Size of the dataset, with --epsilon."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self, console: Console) -> int:
        """Print the plan."""
        assumptions = theory.Assumptions(L=self.L, sigma=self.sigma, q=self.q, gap=self.gap)
        privacy = self._privacy(console)
        with nullcontext() if self.json else console.status("planning"):
            found = theory.plan(
                assumptions, steps=self.steps, target=self.target, batch_size=self.batch_size, dim=self.dim,
                noise_multiplier=self.noise_multiplier, privacy=privacy,
            )  # fmt: skip
            coupled, moves = found.coupled(), found.moves()
        if self.json:
            print(json.dumps(_plan_json(found, coupled, moves), indent=1))
        else:
            _print_plan(console, found, coupled, moves)
        return 0

    def _privacy(self, console: Console) -> theory.Privacy | None:
        if self.epsilon is None:
            given = {"--delta": self.delta, "--examples": self.examples}
            for name, value in given.items():
                if value is not None:
                    raise check.refuse(name, value, "left out without --epsilon", "add --epsilon, or drop it")
            return None
        if self.examples is None:
            raise check.refuse("--examples", None, "given with --epsilon", "say how many examples the dataset has")
        check.count("--examples", self.examples, "it is the size of the dataset")
        delta = self.delta
        if delta is None:
            delta = 1 / (10 * self.examples)
            if not self.json:
                console.print(f"delta = 1/(10 N) = {delta:.3g}")
        return theory.Privacy(self.epsilon, delta, self.examples)


def _plan_json(found: theory.Plan, coupled: theory.CoupledPlan, moves: list[theory.Move]) -> dict:
    return {
        "steps": found.steps,
        "step_size": found.gamma,
        "max_step": found.max_step,
        "quantile": found.p,
        "batch_size": found.batch_size,
        "noise_multiplier": found.noise_multiplier,
        "dim": found.dim,
        "sampling": found.sampling,
        "assumptions": asdict(found.assumptions),
        "privacy": asdict(found.privacy) if found.privacy else None,
        "bound": {**asdict(found.bound), "total": found.bound.total, "dominant": found.bound.dominant},
        "bound_one_run": found.bound.one_run(),
        "unknown_horizon": {**asdict(coupled), "bound": coupled.bound.total, "constant_p": coupled.constant_p},
        "moves": [asdict(move) for move in moves],
    }


def _print_plan(console: Console, found: theory.Plan, coupled: theory.CoupledPlan, moves: list[theory.Move]) -> None:
    a, bound = found.assumptions, found.bound
    choice = Table(title="The plan", show_header=False, title_justify="left")
    choice.add_row("steps T", f"{found.steps:,}")
    choice.add_row("step size gamma", f"{found.gamma:.4g}   (the theorem holds below {found.max_step:.4g})")
    choice.add_row("quantile p", f"{found.p:.6g}   ({1 - found.p:.3g} of the examples clipped)")
    choice.add_row("beta, c", f"{bound.beta:.3g}, {bound.c:.3g}   (they follow)")
    if found.noise_multiplier:
        choice.add_row("noise multiplier z", f"{found.noise_multiplier:.4g}   (std z tau on the clipped sum)")
        choice.add_row("batch size, dimension", f"{found.batch_size:g}, {found.dim:,}   ({found.sampling} sampling)")
    console.print(choice)

    terms = Table(title="What it guarantees: mean of E||grad f||^2", title_justify="left")
    for column in ("term", "value", "share", "shrinks with"):
        terms.add_column(column, justify="right" if column in ("value", "share") else "left")
    reasons = {
        "optimisation": "more steps, larger step size",
        "variance": "smaller step size, larger batch",
        "bias": "less clipping",
    }
    for name, reason in reasons.items():
        value = getattr(bound, name)
        terms.add_row(name, f"{value:.4g}", f"{value / bound.total:.0%}", reason)
    terms.add_row("total", f"{bound.total:.4g}", "", f"one run stays below {bound.one_run():.3g} with probability 95 %")
    console.print(terms)

    motion = Table(title="How the optimum moves", title_justify="left")
    for column in ("with", "step size x", "clipped fraction x", "bound x"):
        motion.add_column(column, justify="left" if column == "with" else "right")
    for move in moves:
        motion.add_row(move.change, f"{move.step_size:.2f}", f"{move.clipped_fraction:.2f}", f"{move.bound:.2f}")
    console.print(motion)

    for line in _reasoning(found):
        console.print(f"- {line}", highlight=False)
    console.print("- For an unknown number of steps:", highlight=False)
    if coupled.constant_p:
        console.print(
            f"  gamma_t = {coupled.step_size:.4g} (t+1)^(-1/2), p = {1 - coupled.clipped_fraction:.4g} constant; "
            f"bound {coupled.bound.total:.4g} after {found.steps:,} steps", highlight=False,
        )  # fmt: skip
    else:
        console.print(
            f"  qclip.schedules.coupled({a.q:g}, {coupled.step_size:.4g}, {coupled.clipped_fraction:.4g}); "
            f"bound {coupled.bound.total:.4g} after {found.steps:,} steps", highlight=False,
        )  # fmt: skip


def _reasoning(found: theory.Plan) -> list[str]:
    share = getattr(found.bound, found.bound.dominant) / found.bound.total
    name = found.bound.dominant
    lines = [
        f"The {name} term dominates." if share > 0.5 else f"The terms are balanced; the {name} term is the largest."
    ]
    if found.at_edge:
        lines.append(
            "The bound would rather clip nothing: p stands at its limit, one example in the whole run. Clipping pays "
            "for heavier tails (q < 2) over longer runs, and for privacy."
        )
    elif found.noise_multiplier:
        lines.append(
            "Clipping more (a smaller p) lowers the threshold and with it the noise; clipping less lowers the bias: p "
            "balances the two. Keep p constant: p -> 1 would let the threshold, and the noise, grow."
        )
    else:
        lines.append("Clipping more tames the tail, clipping less lowers the bias: p balances the two.")
    if found.privacy:
        lines.append(
            "At a fixed budget the noise grows with the steps, so more steps stop helping; more examples do help."
        )
    return lines


@dataclass(frozen=True)
class Bench:
    """Time one training step: plain, clipped by qclip, and by Opacus where it is installed, in one run."""

    device: str = "cpu"
    """Where to run: cpu, cuda or cuda:1."""
    rounds: int = 15
    """How often each mode takes its turn; the median counts."""
    case: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A case to run (repeat it for several); all of them when left out."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self, console: Console) -> int:
        """Print the table."""
        from qclip import bench

        with nullcontext() if self.json else console.status("measuring") as status:
            say = None if status is None else status.update
            rows = bench.run(self.device, rounds=check.count("rounds", self.rounds), cases=self.case, say=say)
        if self.json:
            print(json.dumps([asdict(row) for row in rows], indent=2))
            return 0
        table = Table(title=bench.describe(self.device))
        for column in ("case", "mode", "ms", "peak MiB", "time", "memory"):
            table.add_column(column, justify="left" if column in ("case", "mode") else "right")
        for before, row in zip([None, *rows], rows, strict=False):
            if before is not None and before.case != row.case:
                table.add_section()
            cells = (
                f"{row.ms:.1f}",
                f"{row.peak_bytes / 2**20:.1f}",
                f"{row.ratio_time:.2f}",
                f"{row.ratio_memory:.2f}",
            )
            table.add_row(row.case, row.mode, *cells)
        console.print(table)
        console.print(
            "time and memory are relative to the plain step; every step includes its update, private ones noise"
        )
        return 0


Command = (
    Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit status."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"qclip {__version__}")
        return 0
    command = tyro.cli(
        Command,
        args=arguments,
        prog="qclip",
        description="Clipping at a quantile of the gradient norms: the paper's claims, a planner, benchmarks.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    console = Console()
    try:
        return command.run(console)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; what was finished is in the output folder")
        return 130


if __name__ == "__main__":
    sys.exit(main())

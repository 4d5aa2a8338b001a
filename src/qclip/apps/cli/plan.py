"""``qclip plan``."""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from qclip import _validate as check
from qclip import theory

if TYPE_CHECKING:
    from qclip.training.advice import Change
    from qclip.training.plan import PrivatePlan, TrainingPlan

BATCH_SIZE = "it is the expected number of examples per step"


@dataclass(frozen=True)
class PlanCommand:
    """Plan a run: with a privacy budget its noise, thresholds and epsilon by epoch; with L, sigma and gap its bound.

    Privacy: --examples, --params and --epsilon. The batch size and the length are recommended, unless --batch-size and
    --epochs or --steps are given; then --noise-multiplier may stand for --epsilon. The bound: --L, --sigma and --gap,
    with --steps or --target; the plan takes the step size and the quantile that minimise the bound, and explains them.
    Both kinds of options may be given together.
    """

    L: Annotated[float | None, tyro.conf.arg(name="L")] = None
    """Smoothness of the objective."""
    sigma: float | None = None
    """Bound on the q-th moment of the gradient noise, (E||g - grad f||^q)^(1/q)."""
    gap: float | None = None
    """f(x0) - inf f."""
    q: float | None = None
    """The bounded moment, in (1, 2]; 2 when left out."""
    steps: int | None = None
    """Length of the run, in steps."""
    epochs: int | None = None
    """Instead of --steps, with --examples: length of the run, in epochs."""
    target: float | None = None
    """Instead of --steps: the mean of E||grad f||^2 to reach."""
    batch_size: float | None = None
    """Expected batch size; recommended when left out, or 1 in a plan of the bound."""
    params: Annotated[int | None, tyro.conf.arg(aliases=("--dim",))] = None
    """Number of trainable parameters, which the noise grows with; 1 when left out of a plan that needs no advice."""
    noise_multiplier: float = 0.0
    """Noise multiplier of a private run, of gradient and counts together."""
    epsilon: float | None = None
    """Instead of --noise-multiplier: a privacy budget, with --examples."""
    delta: float | None = None
    """Delta of the budget; 1/(10 examples) when left out."""
    examples: int | None = None
    """Size of the data set, with --epsilon or --noise-multiplier."""
    p: float | None = None
    """Fraction of examples to leave unclipped; that of the bound, or 0.7, when left out."""
    groups: int | None = None
    """Number of groups of parameters that are clipped separately; 1 when left out."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self, console: Console) -> int:
        """Print the plan."""
        self._check()
        assumptions = self._assumptions()
        if assumptions is None and self.examples is None:
            raise check.Refusal(
                "there is nothing to plan; give --examples with --epsilon for the privacy, --L, --sigma and --gap for "
                "the bound, or all of them"
            )
        if self.examples is not None and self.delta is None and not self.json:
            console.print(f"delta = 1/(10 N) = {self._delta:.3g}")
        with nullcontext() if self.json else console.status("planning"):
            private, bound = self._plans(assumptions)
            changes = self._changes(private)
        if self.json:
            fields: dict[str, Any] = {} if bound is None else _theory_json(*bound)
            fields["privacy_plan"] = None if private is None else private.as_json()
            fields["what_if"] = [change.as_json() for change in changes]
            print(json.dumps(fields, indent=1))
            return 0
        from qclip.apps.cli.plan_tables import print_changes, print_private, print_theory

        if private is not None:
            print_private(console, private, recommended=self._needs_advice)
        if changes:
            print_changes(console, changes)
        if bound is not None:
            print_theory(console, *bound)
        return 0

    def _plans(self, assumptions: theory.Assumptions | None) -> "tuple[PrivatePlan | None, TheoryPlans | None]":
        training = None
        if self.examples is not None and self.target is None:
            training = self._recommended() if self._needs_advice else self._training()
        best = None if assumptions is None else self._theory(assumptions, training)
        private = None if self.examples is None else self._private(training, best)
        return private, None if best is None else (best, best.coupled(), best.moves())

    def _check(self) -> None:
        """Refuse settings that contradict each other or are incomplete, before computing anything."""
        private = self.epsilon is not None or self.noise_multiplier > 0
        if self.epsilon is not None and self.noise_multiplier:
            remedy = "give the budget, or the noise multiplier"
            raise check.refuse("--noise-multiplier", self.noise_multiplier, "left out with --epsilon", remedy)
        if self.examples is None:
            if self.epsilon is not None:
                raise check.Refusal("--epsilon was given without --examples; add the size of the data set")
            apart = {"--delta": self.delta, "--epochs": self.epochs, "--p": self.p, "--groups": self.groups}
            for name, value in apart.items():
                if value is not None:
                    bound = "left out without --examples, and --epsilon or --noise-multiplier"
                    raise check.refuse(name, value, bound, "add them, or drop it")
            return
        check.count("--examples", self.examples, "it is the size of the data set")
        if not private:
            bound = "left out without --epsilon or --noise-multiplier"
            raise check.refuse("--examples", self.examples, bound, "add the privacy budget, or drop it")
        if self._needs_advice:
            self._check_advice()

    def _check_advice(self) -> None:
        instead = "or give --batch-size, and --epochs or --steps"
        if self.epsilon is None:
            bound = "left out of a recommendation, where the noise follows from the budget"
            raise check.refuse("--noise-multiplier", self.noise_multiplier, bound, f"give --epsilon, {instead}")
        if self.params is None:
            raise check.Refusal(
                "--params is missing, without which no batch size and length can be recommended; add the number of "
                f"trainable parameters, sum(p.numel() for p in model.parameters() if p.requires_grad), {instead}"
            )

    def _assumptions(self) -> theory.Assumptions | None:
        if self.L is not None and self.sigma is not None and self.gap is not None:
            return theory.Assumptions(L=self.L, sigma=self.sigma, q=2.0 if self.q is None else self.q, gap=self.gap)
        given = {"--L": self.L, "--sigma": self.sigma, "--gap": self.gap}
        for name, value in (given | {"--q": self.q, "--target": self.target}).items():
            if value is not None:
                missing = next(other for other, absent in given.items() if absent is None)
                raise check.Refusal(
                    f"{name} was given without {missing}; the bound needs --L, --sigma and --gap, and a plan of the "
                    "privacy alone needs none of them"
                )
        return None

    @property
    def _needs_advice(self) -> bool:
        """Whether the batch size or the length is to be recommended."""
        given = self.batch_size is not None and (self.epochs is not None or self.steps is not None)
        return self.examples is not None and self.L is None and not given

    @property
    def _dim(self) -> int:
        return 1 if self.params is None else self.params

    @property
    def _batch_size(self) -> float:
        return 1.0 if self.batch_size is None else self.batch_size

    @property
    def _delta(self) -> float:
        assert self.examples is not None
        return 1 / (10 * self.examples) if self.delta is None else self.delta

    def _recommended(self) -> "TrainingPlan":
        from qclip.training.advice import recommend

        assert self.examples is not None
        assert self.params is not None
        assert self.epsilon is not None
        size = None if self.batch_size is None else check.count("--batch-size", self.batch_size, BATCH_SIZE)
        given: dict[str, Any] = {"batch_size": size, "epochs": self.epochs, "steps": self.steps}
        return recommend(self.examples, self.params, epsilon=self.epsilon, delta=self._delta, **given)

    def _changes(self, private: "PrivatePlan | None") -> "tuple[Change, ...]":
        from qclip.training.advice import what_if

        # Without the number of parameters there is no S, and without a budget nothing to recalibrate the noise for.
        if private is None or self.params is None or private.training.epsilon is None:
            return ()
        return what_if(private)

    def _training(self, **instead: Any) -> "TrainingPlan":
        from qclip.training.plan import plan_training

        assert self.examples is not None
        noise = None if self.epsilon is not None else self.noise_multiplier
        given: dict[str, Any] = {
            "epochs": self.epochs,
            "steps": self.steps,
            "epsilon": self.epsilon,
            "noise_multiplier": noise,
        }
        batch_size = check.count("--batch-size", self._batch_size, BATCH_SIZE)
        return plan_training(self.examples, batch_size, delta=self._delta, **(given | instead))

    def _theory(self, assumptions: theory.Assumptions, training: "TrainingPlan | None") -> theory.Plan:
        public: dict[str, Any] = {"batch_size": self._batch_size, "dim": self._dim}
        privacy = None
        if self.epsilon is not None and self.examples is not None:
            privacy = theory.Privacy(self.epsilon, self._delta, self.examples)
        if training is None:
            public |= {"noise_multiplier": self.noise_multiplier, "privacy": privacy, "target": self.target}
            return theory.plan(assumptions, steps=self.steps, **public)
        # The noise is already calibrated, which takes seconds.
        steps, noise = training.num_steps, training.noise_multiplier
        return replace(theory.plan(assumptions, steps=steps, noise_multiplier=noise, **public), privacy=privacy)

    def _private(self, training: "TrainingPlan | None", best: theory.Plan | None) -> "PrivatePlan":
        from qclip.training.plan import plan_private

        if training is None:  # the target determines the number of steps, and with it the noise
            assert best is not None
            noise = best.noise_multiplier
            training = self._training(epochs=None, steps=best.steps, epsilon=None, noise_multiplier=noise)
            training = replace(training, epsilon=self.epsilon)
        p = self.p if self.p is not None else best.p if best is not None else 0.7
        return plan_private(training, p=p, num_groups=1 if self.groups is None else self.groups, dim=self._dim)


TheoryPlans = tuple[theory.Plan, theory.CoupledPlan, list[theory.Move]]


def _theory_json(best: theory.Plan, coupled: theory.CoupledPlan, moves: list[theory.Move]) -> dict[str, Any]:
    return {
        "steps": best.steps,
        "step_size": best.gamma,
        "max_step": best.max_step,
        "quantile": best.p,
        "batch_size": best.batch_size,
        "noise_multiplier": best.noise_multiplier,
        "dim": best.dim,
        "sampling": best.sampling,
        "assumptions": asdict(best.assumptions),
        "privacy": asdict(best.privacy) if best.privacy else None,
        "bound": {**asdict(best.bound), "total": best.bound.total, "dominant": best.bound.dominant},
        "bound_one_run": best.bound.one_run(),
        "unknown_horizon": {**asdict(coupled), "bound": coupled.bound.total, "constant_p": coupled.constant_p},
        "moves": [asdict(move) for move in moves],
    }

"""Made-up rounds of clients, and the aggregate of one computed one client at a time."""

import math

import torch

from qclip.engine.gradients.clipping import rounding_margin
from qclip.federated import Aggregator, Terms, answered
from qclip.thresholds import (
    BalancedThreshold,
    Constant,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    SlackQuantile,
)

PRIVATE = {
    "constant": Constant(0.7),
    "scheduled": Constant(lambda step: 0.9 / (1 + step)),
    "private quantile": PrivateQuantile(0.5),
    "private quantile, high": PrivateQuantile(0.9, initial=3.0),
    "geometric": GeometricQuantile(0.5),
    "geometric, off centre": GeometricQuantile(0.9, centre=0.1),
    "histogram": HistogramQuantile(0.5),
    "slack": SlackQuantile(0.5, initial=1.0),
    "balanced": BalancedThreshold(),
}
GROUPS = {"flat": "flat", "per-layer": "per-layer", "named": {"head": "head.*", "rest": "*"}}
LIKE = {"body.weight": torch.zeros(4, 3), "body.bias": torch.zeros(4), "head.weight": torch.zeros(2, 4)}
ODD = {0: 1e6, 1: math.nan, 2: math.inf, 3: 0.0, 4: 1e-20, 5: -math.inf}
"""What the updates of some clients are filled with: the one client in ten that a test looks at."""
MARGIN = rounding_margin([torch.float32])
"""What a clipped update leaves of its bound."""
SETTINGS = {"num_clients": 200, "cohort_size": 100, "rounds": 4, "noise_multiplier": 0.5, "delta": 1e-3, "seed": 5}


def aggregator(threshold=None, groups="flat", like=LIKE, **changes):
    given = {} if threshold is None else {"threshold": threshold}
    return Aggregator(like, groups=GROUPS.get(groups, groups), **given, **(SETTINGS | changes))


def update_of(client, number=0, like=LIKE):
    """The update of a client in a round: a pure function of both."""
    generator = torch.Generator().manual_seed(1000 * number + int(client))
    scale = torch.randn((), generator=generator).mul(0.5).exp() / 4
    update = {name: scale * torch.randn(x.shape, generator=generator).to(x.dtype) for name, x in like.items()}
    if (value := ODD.get(int(client))) is not None:
        name = list(like)[int(client) % len(like)]
        update[name] = torch.full_like(update[name], value) if value else update[name] * 0
    return {name: x * 0 for name, x in update.items()} if value == 0 else update


def stacked(updates, like=LIKE):
    return {name: torch.stack([update[name] for update in updates]) for name in like}


def clipped_alone(update, members, clip_norms):
    """The clipped update of one client and its norms by group, in float64, straight from the definition."""
    squares = [0.0] * len(clip_norms)
    for name, x in update.items():
        squares[members[name]] += float(x.double().square().sum())
    if not all(map(math.isfinite, squares)):
        return {name: torch.zeros_like(x, dtype=torch.float64) for name, x in update.items()}, [math.inf] * len(squares)
    norms = [math.sqrt(square) for square in squares]
    limits = [(1 - MARGIN) * tau for tau in clip_norms]
    factors = [min(1.0, limit / norm) if norm > 0 else 1.0 for limit, norm in zip(limits, norms, strict=True)]
    return {name: x.double() * factors[members[name]] for name, x in update.items()}, norms


def answers_of(aggregator, updates):
    """What the clients send that clip their updates themselves."""
    terms = Terms.from_json(aggregator.terms.to_json())  # as it travels
    return [answered(update, terms) for update in updates]

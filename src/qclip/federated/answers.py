"""A client's answer to the question of the threshold, when the update is clipped at the client.

The server sends the `Terms` of a round, which are public. The client clips its update and computes its part of the
counts and of the slack: a few numbers that are summed as the update is. The server trusts neither: it clips the update
together with the slack, and the counts, to the bounds that the noise is made for.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from qclip import _validate as check
from qclip.engine.groups import Groups
from qclip.federated.updates import Layout, Update, in_float64, require_real
from qclip.thresholds import Count, Question, Slack
from qclip.thresholds.threshold import Grid
from qclip.training.sums import BoundedSum, Key, Query, RawSums, raw_sums


@dataclass(frozen=True)
class Terms:
    """What a client needs to know in a round: public, and made of numbers and strings."""

    clip_norms: tuple[float, ...]
    """The clip norm of each group."""
    members: Mapping[str, int]
    """The group of each tensor of an update."""
    count_radii: Grid = ()
    count_centre: float = 0.0
    slack_radii: Grid = ()

    @staticmethod
    def of(query: Query, members: Mapping[str, int]) -> "Terms":
        """Return the terms of a query whose clip norms are known before the round."""
        assert isinstance(query.clip_norms, tuple)
        count, slack = query.question.count, query.question.slack
        return Terms(
            query.clip_norms,
            dict(members),
            () if count is None else count.radii,
            0.0 if count is None else count.centre,
            () if slack is None else slack.radii,
        )

    def to_json(self) -> str:
        """Return the terms as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Terms":
        """Return the terms of a `to_json`; refuse what is none."""
        try:
            fields = json.loads(text)
            grids = {name: tuple(map(tuple, fields[name])) for name in ("count_radii", "slack_radii")}
            return Terms(
                tuple(map(float, fields["clip_norms"])),
                {str(name): int(group) for name, group in fields["members"].items()},
                count_centre=float(fields["count_centre"]),
                **grids,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            remedy = "the server and the client need the same version of qclip"
            raise check.refuse("terms", text, "those of qclip.federated.Terms.to_json", remedy) from error

    @property
    def question(self) -> Question:
        """The question of the threshold."""
        count = Count(self.count_radii, self.count_centre) if self.count_radii else None
        return Question(count, Slack(self.slack_radii) if self.slack_radii else None)

    @property
    def answer_length(self) -> int:
        """The number of coordinates of an answer: those of the counts, then those of the slack."""
        return sum(map(len, (*self.count_radii, *self.slack_radii)))


def answered(update: Update, terms: Terms) -> tuple[dict[str, Tensor], Tensor]:
    """Clip the update of one client, at the client, and answer the question of the threshold.

    Args:
        update: The update by name.
        terms: The terms of the round, as the server sent them.

    Returns:
        The clipped update, and the answer [N]. Nothing else needs to leave the client.

    Raises:
        qclip.Refusal: If the update has other names than the terms, or is not made of floating-point tensors.
    """
    groups = Groups(tuple(map(str, range(len(terms.clip_norms)))), dict(terms.members))
    if set(update) != set(terms.members):
        remedy = "train the tensors that the server sent, and keep their names"
        raise check.refuse("update", sorted(update), f"the tensors {sorted(terms.members)}", remedy)
    layout = Layout.of({name: update[name] for name in terms.members}, groups)
    question = terms.question
    coefficients = () if question.slack is None else question.slack.coefficients(terms.clip_norms)
    members = {Key("gradient", name): group for name, group in terms.members.items()}
    query = Query(terms.clip_norms, question, members, layout.dims, coefficients)
    raw = raw_sums(layout.clipped(layout.one(update), terms.clip_norms), 1, query)
    parts = [] if raw.counts is None else [raw.counts.tensors[Key("counts")].flatten()]
    parts += [raw.gradient.tensors[Key("slack", k)].float() for k in range(len(coefficients))]
    clipped = {name: raw.gradient.tensors[Key("gradient", name)].to(update[name].dtype) for name in layout.tensors}
    return clipped, torch.cat(parts) if parts else torch.zeros(0, device=layout.device)


@torch.no_grad()
def contribution(update: Update, answer: Tensor, layout: Layout, query: Query) -> RawSums:
    """Return what one client adds to the sums of a round: its clipped update and its answer, within their bounds.

    Guarantees:
        * The update and the slack together add at most the clip norm of a group to that group, and the counts at most
          their own bound, whatever the client sent.
        * What is not finite adds nothing, and changes nothing of another client.

    Args:
        update: The clipped update.
        answer: The answer, [N].
        layout: The layout of an update.
        query: The query of the round.

    Raises:
        qclip.Refusal: If the update is of another layout, or the answer of another length.
    """
    one = layout.one(update)
    terms = Terms.of(query, layout.groups.members)
    require_real("answer", answer)
    if answer.shape != (terms.answer_length,):
        remedy = "answer the question of this round"
        raise check.refuse_shape("answer", tuple(answer.shape), f"({terms.answer_length},)", remedy)
    assert isinstance(query.clip_norms, tuple)
    counts, *slack = answer.to(layout.device, torch.float32).split(
        [sum(map(len, terms.count_radii)), *map(len, terms.slack_radii)]
    )
    # Together in one group, because together they are bounded: the slack is what the update leaves of its bound.
    joint = {f"update {name}": x[0].to(layout.device) for name, x in one.items()}
    joint |= {f"slack {k}": x for k, x in enumerate(slack)}
    groups = {f"update {name}": group for name, group in layout.groups.members.items()}
    sums = _bounded(joint, groups | {f"slack {k}": k for k in range(len(slack))}, query.clip_norms)
    gradient = {Key("gradient", name): sums[f"update {name}"] for name in one}
    gradient |= {Key("slack", k): sums[f"slack {k}"] for k in range(len(slack))}
    raw = RawSums(
        BoundedSum(gradient, query.members, query.clip_norms, query.dims),
        None if query.question.count is None else _counts(counts, query.question.count),
        num_examples=1,
        any_finite=torch.ones((), dtype=torch.bool, device=layout.device),
    )
    return in_float64(raw)


def _counts(counts: Tensor, count: Count) -> BoundedSum:
    """Return the counts of one client, within their bound."""
    bounded = _bounded({"counts": counts}, {"counts": 0}, (count.l2_bound,))["counts"]
    key, bound = Key("counts"), count.l2_bound
    return BoundedSum({key: bounded.reshape(len(count.radii), -1)}, {key: 0}, (bound,), (len(counts),))


def _bounded(tensors: Update, members: Mapping[str, int], bounds: tuple[float, ...]) -> dict[str, Tensor]:
    """Return the tensors of one client, each group clipped to its bound; zeros if any is not finite."""
    layout = Layout.of(tensors, Groups(tuple(map(str, range(len(bounds)))), members))
    return layout.clipped(layout.one(tensors), bounds).sums

"""The aggregator: the same sums by every path, noise and epsilon of the plan, rounds that are atomic, odd updates."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import qclip
from federated import rounds
from qclip import Refusal, accounting
from qclip.federated import Aggregator
from qclip.thresholds import Constant, ExactQuantile, PrivateQuantile, RollingQuantile
from qclip.training import checkpoint
from qclip.training.sums import Key
from shards import every

ALL = [(threshold, groups) for threshold in rounds.PRIVATE for groups in rounds.GROUPS]


def streamed(aggregator, updates):
    return aggregator.aggregate(iter(updates))


def in_one_stack(aggregator, updates):
    return aggregator.aggregate_stacked(rounds.stacked(updates))


def in_stacks(aggregator, updates):
    return aggregator.aggregate_stacked(rounds.stacked(updates[k : k + 37]) for k in range(0, len(updates), 37))


def clipped_at_the_client(aggregator, updates):
    return aggregator.aggregate_answered(rounds.answers_of(aggregator, updates))


PATHS = [streamed, in_one_stack, in_stacks, clipped_at_the_client]


@pytest.mark.parametrize(("threshold", "groups"), every(3, ALL, name="-".join))
def test_every_path_is_one_client_at_a_time(recorder, threshold, groups):
    """Against the definition: sums of clipped updates, counts of norms, and coordinates of the slack."""
    for path in PATHS:
        aggregator = rounds.aggregator(rounds.PRIVATE[threshold], groups)
        members = aggregator._layout.groups.members
        question = aggregator.threshold.ask(aggregator._threshold_state, 0)
        taus = aggregator.clip_norms
        updates = [rounds.update_of(client) for client in aggregator.sample()]
        recorder.values.clear()
        mean = path(aggregator, updates)
        alone = [rounds.clipped_alone(update, members, taus) for update in updates]
        gradient = recorder.values[0].tensors
        for name in rounds.LIKE:
            expected = sum(clipped[name] for clipped, _ in alone)
            assert torch.allclose(gradient[Key("gradient", name)].double(), expected, rtol=1e-5, atol=1e-6 * sum(taus))
            assert (mean[name].dtype, mean[name].shape) == (rounds.LIKE[name].dtype, rounds.LIKE[name].shape)
        norms = np.array([norms for _, norms in alone], dtype=np.float32)
        if question.count is not None:
            bins = [
                np.histogram(norms[:, k], (-1.0, *np.float32(radii)))[0] - question.count.centre * len(norms)
                for k, radii in enumerate(question.count.radii)
            ]
            counts = recorder.values[1].tensors[Key("counts")]
            assert np.allclose(counts.numpy(), np.array(bins), atol=1e-4)
        if question.slack is not None:
            for k, row in enumerate(question.slack.coefficients(taus)):
                within = [(norms[:, k] <= np.float32(radius)).sum() for radius in question.slack.radii[k]]
                assert np.allclose(gradient[Key("slack", k)].numpy(), np.array(within) * row, rtol=1e-5)


@pytest.mark.parametrize("groups", rounds.GROUPS)
def test_thousands_of_clients_in_stacks_and_one_after_the_other(groups):
    """More than are summed in float32 at once; without noise the releases agree."""
    updates = [rounds.update_of(client) for client in range(700)]
    changes = {"num_clients": 700, "cohort_size": 700, "noise_multiplier": 0}
    means = [path(rounds.aggregator(None, groups, **changes), updates) for path in PATHS]
    for other in means[1:]:
        for name, x in means[0].items():
            assert torch.allclose(x, other[name], rtol=1e-5, atol=1e-7)


def test_a_round_is_the_private_step(monkeypatch):
    """The mean is over the expected cohort, whoever replied, and noise is drawn by training's mechanism alone."""
    aggregator = rounds.aggregator(Constant(0.7), noise_multiplier=0)
    updates = [{name: torch.full_like(x, 1e-3) for name, x in rounds.LIKE.items()}] * 3
    mean = aggregator.aggregate(updates)
    assert torch.allclose(mean["body.bias"], torch.full((4,), 3e-3 / 100))


def test_the_noise_is_that_of_the_plan():
    """Over 2 x 200,000 coordinates the standard deviation is within 1 %: five standard errors are 0.8 %."""
    like = {"a.weight": torch.zeros(200_000), "b.weight": torch.zeros(200_000)}
    z, B = 1.5, 40
    settings = {"like": like, "num_clients": 400, "cohort_size": B, "noise_multiplier": z, "seed": 3}
    flat = rounds.aggregator(Constant(0.5), **settings)
    per_layer = rounds.aggregator(Constant(0.5), "per-layer", **settings)
    counting = rounds.aggregator(PrivateQuantile(0.5, initial=0.5, noise_share=0.1), **settings)
    for aggregator, std in [
        (flat, z * 0.5 / B),
        (per_layer, z * 0.5 * math.sqrt(2) / B),
        (counting, 1.1 * z * 0.5 / B),
    ]:
        mean = aggregator.aggregate([])
        for x in mean.values():
            assert abs(x.std().item() / std - 1) < 0.01
            assert abs(x.mean().item()) < 5 * std / math.sqrt(x.numel())


@pytest.mark.parametrize("groups", rounds.GROUPS)
@pytest.mark.parametrize("threshold", rounds.PRIVATE)
def test_sum_and_counts_share_one_release(recorder, threshold, groups):
    z = 0.5
    aggregator = rounds.aggregator(rounds.PRIVATE[threshold], groups, noise_multiplier=z)
    aggregator.aggregate([])
    cost = 0.0
    for value, stds in zip(recorder.values, recorder.stds, strict=True):
        cost += sum((bound / std) ** 2 for bound, std in zip(value.group_bounds, stds, strict=True))
    assert cost == pytest.approx(1 / z**2, rel=1e-9)
    assert accounting.merge(*aggregator.noise_multipliers) >= z


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_that_of_the_rounds_done(accountant):
    aggregator = rounds.aggregator(accountant=accountant, noise_multiplier=1.3)
    facts = {"noise_multiplier": 1.3, "sample_rate": 0.5, "accountant": accountant}
    for done in range(3):
        assert aggregator.epsilon() == accounting.epsilon(steps=done, delta=1e-3, **facts)
        assert aggregator.epsilon(1e-5) == accounting.epsilon(steps=done, delta=1e-5, **facts)
        aggregator.aggregate([])  # an empty round is charged for


def test_a_budget_is_met_at_the_last_round_and_ends_the_run():
    aggregator = rounds.aggregator(noise_multiplier=None, epsilon=4.0, rounds=3)
    for _ in range(3):
        assert not aggregator.finished
        aggregator.aggregate([])
    assert aggregator.finished
    assert 3.9 < aggregator.epsilon() <= 4.0
    for refused in (aggregator.sample, lambda: aggregator.aggregate([]), lambda: aggregator.aggregate_stacked([])):
        with pytest.raises(Refusal, match=r"round = 3 must be < rounds = 3: the budget is spent; plan more rounds"):
            refused()
    assert aggregator.round == 3


def test_cohorts_are_poisson():
    """Binomial(2000, 0.05) sizes, each client as often as another: 400 rounds, five standard errors."""
    aggregator = rounds.aggregator(num_clients=2000, cohort_size=100, rounds=400, noise_multiplier=0)
    times = np.zeros(2000)
    sizes = []
    for _ in range(400):
        drawn = aggregator.sample()
        assert (drawn == aggregator.sample()).all()  # a pure function of the seed and the round
        assert (np.diff(drawn) > 0).all()
        times[drawn] += 1
        sizes.append(len(drawn))
        aggregator.aggregate([])
    assert abs(np.mean(sizes) - 100) < 5 * math.sqrt(95 / 400)
    assert abs(np.var(sizes) / 95 - 1) < 5 * math.sqrt(2 / 400)
    assert abs(times - 20).max() < 6 * math.sqrt(19)  # the largest of 2000


def test_other_seeds_draw_other_cohorts():
    cohorts = [tuple(rounds.aggregator(seed=seed).sample()) for seed in (0, 1, None, None)]
    assert len(set(cohorts)) == 4


def test_a_fixed_cohort_is_never_accounted_for_as_poisson():
    with pytest.raises(Refusal, match=r"sampling = 'fixed' must be \"poisson\" with noise.*replacement of a client"):
        rounds.aggregator(sampling="fixed")
    aggregator = rounds.aggregator(sampling="fixed", noise_multiplier=0)
    assert len(aggregator.sample()) == 100
    aggregator.aggregate([])
    assert aggregator.epsilon() == math.inf


def test_more_updates_than_drawn_clients_are_refused():
    aggregator = rounds.aggregator()
    everybody = [rounds.update_of(client) for client in range(200)]
    for path in PATHS:
        with pytest.raises(Refusal, match=r"must be those of the \d+ clients of sample\(\), each at most once"):
            path(aggregator, everybody)
    assert aggregator.round == 0


@pytest.mark.parametrize("odd", [[], [math.nan], [math.inf, -math.inf], [0.0], [1e30], [3e38], [math.nan, 1.0]])
@pytest.mark.parametrize("path", [streamed, in_stacks, clipped_at_the_client])
def test_odd_updates_end_in_finite_releases(odd, path):
    aggregator = rounds.aggregator(rounds=3)
    for _ in range(3):
        mean = path(aggregator, [{name: torch.full_like(x, value) for name, x in rounds.LIKE.items()} for value in odd])
        assert all(x.isfinite().all() for x in mean.values())
        assert all(math.isfinite(tau) and tau > 0 for tau in aggregator.clip_norms)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_clipped_and_adds_nothing(recorder, bad):
    aggregator = rounds.aggregator(PrivateQuantile(0.5, initial=100.0), "per-layer")
    good, broken = rounds.update_of(20), rounds.update_of(21)
    broken["head.weight"][0, 0] = bad  # in one group: it adds nothing to the other either
    aggregator.aggregate([good, broken])
    gradient, counts = recorder.values
    for name, x in good.items():
        assert torch.equal(gradient.tensors[Key("gradient", name)], x.double())
    assert counts.tensors[Key("counts")].tolist() == [[0.0], [0.0]]  # one within its tau, one not, each less a half


def test_zeros_count_as_unclipped(recorder):
    rounds.aggregator().aggregate([{name: x * 0 for name, x in rounds.LIKE.items()}] * 3)
    assert recorder.values[1].tensors[Key("counts")].tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda u: u | {"other": torch.ones(1)}, r"missing \[\], unknown \['other'\]"),
        (lambda u: {"head.weight": u["head.weight"]}, r"missing \['body.bias', 'body.weight'\]"),
        (lambda u: u | {"body.bias": torch.ones(5)}, r"update\['body.bias'\] has shape \(5,\) instead of \(4,\)"),
        (lambda u: u | {"body.bias": torch.ones(4, dtype=torch.int32)}, r"dtype of update\['body.bias'\].*int32"),
        (lambda u: u | {"body.bias": torch.ones(4).to(torch.float8_e4m3fn)}, r"dtype of update\['body.bias'\]"),
        (lambda u: u | {"body.bias": np.ones(4)}, r"update\['body.bias'\] = 'ndarray' must be a tensor"),
        (lambda u: u | {"body.bias": torch.ones(4, device="meta")}, "must be a dense tensor with elements"),
        (lambda u: [torch.ones(4)], "must be a mapping from names to tensors"),
    ],
)
def test_an_update_of_another_layout_is_refused_by_name_and_the_round_stays(change, message):
    aggregator = rounds.aggregator()
    before = aggregator.state_dict()
    with pytest.raises(Refusal, match=message):
        aggregator.aggregate([rounds.update_of(20), change(rounds.update_of(21))])
    assert aggregator.state_dict() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"body.bias": s["body.bias"][:2]}, "must be of as many clients under every name"),
        (lambda s: s | {"body.bias": torch.ones(3, 5)}, r"has shape \(3, 5\) instead of \[clients, \*\(4,\)\]"),
        (lambda s: s | {"body.bias": torch.ones(())}, r"has shape \(\) instead of"),
        (lambda s: dict(list(s.items())[:1]), "missing"),
    ],
)
def test_a_stack_of_another_layout_is_refused(change, message):
    stack = rounds.stacked([rounds.update_of(client) for client in (20, 21, 22)])
    with pytest.raises(Refusal, match=message):
        rounds.aggregator().aggregate_stacked(change(stack))


def test_a_round_that_fails_changes_and_spends_nothing():
    aggregator, twin = rounds.aggregator(), rounds.aggregator()

    def failing():
        yield rounds.update_of(20)
        raise KeyboardInterrupt

    cohort = aggregator.sample()
    with pytest.raises(KeyboardInterrupt):
        aggregator.aggregate(failing())
    assert (aggregator.round, aggregator.epsilon()) == (0, 0.0)
    assert (aggregator.sample() == cohort).all()
    for each in (aggregator, twin):
        each.aggregate(rounds.update_of(client) for client in cohort)
    assert aggregator.state_dict() == twin.state_dict()


def finish(aggregator, stop=4):
    means = []
    while aggregator.round < stop:
        means.append(
            aggregator.aggregate([rounds.update_of(client, aggregator.round) for client in aggregator.sample()])
        )
    return means


@pytest.mark.parametrize(("threshold", "groups"), every(4, ALL, name="-".join))
def test_a_resumed_run_is_the_run(tmp_path, threshold, groups):
    whole = rounds.aggregator(rounds.PRIVATE[threshold], groups)
    means = finish(whole)
    stopped = rounds.aggregator(rounds.PRIVATE[threshold], groups)
    finish(stopped, stop=2)
    checkpoint.write(tmp_path / "round.pt", {"aggregator": stopped.state_dict()})
    resumed = rounds.aggregator(rounds.PRIVATE[threshold], groups, seed=77)  # its own seed is not used
    resumed.load_state_dict(checkpoint.read(tmp_path / "round.pt")["aggregator"])
    for mean, expected in zip(finish(resumed), means[2:], strict=True):
        assert all(torch.equal(mean[name], expected[name]) for name in expected)
    assert resumed.history == whole.history
    assert resumed.epsilon() == whole.epsilon()
    assert resumed.state_dict() == whole.state_dict()


def test_without_a_seed_a_resumed_run_draws_the_same_cohorts_and_fresh_noise():
    """Its clients' updates may differ from those of a round that is run again: the same noise could be subtracted."""
    first = rounds.aggregator(seed=None)
    finish(first, stop=2)
    state = first.state_dict()
    assert state["secrets"]["noise"] is None
    cohort, mean = first.sample(), finish(first, stop=3)[0]
    again = rounds.aggregator(seed=None)
    again.load_state_dict(state)
    assert (again.sample() == cohort).all()
    assert not torch.equal(finish(again, stop=3)[0]["body.bias"], mean["body.bias"])
    assert again.epsilon() == first.epsilon()


def test_the_state_of_a_complete_run_holds_no_secret():
    aggregator = rounds.aggregator()
    finish(aggregator, stop=3)
    entropy = aggregator.state_dict()["secrets"]["sampling"]["entropy"]
    assert entropy == 5
    finish(aggregator)
    state = aggregator.state_dict()
    assert state["secrets"] is None
    fresh = rounds.aggregator()
    fresh.load_state_dict(state)
    assert fresh.finished
    assert fresh.history == aggregator.history


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"noise_multiplier": 0.6}, "plan"),
        ({"threshold": PrivateQuantile(0.6)}, "threshold"),
        ({"groups": "per-layer"}, "groups"),
        ({"like": {"body.bias": torch.zeros(4)}}, "layout"),
        ({"seed": None}, "seed"),
    ],
)
def test_the_state_of_another_run_is_refused(changes, name):
    saved = rounds.aggregator()
    finish(saved, stop=1)
    other = rounds.aggregator(**changes)
    before = other.state_dict()
    with pytest.raises(Refusal, match=f"^{name}"):
        other.load_state_dict(saved.state_dict())
    assert other.state_dict() == before


def test_a_run_does_not_go_back():
    aggregator = rounds.aggregator()
    finish(aggregator, stop=1)
    state = aggregator.state_dict()
    finish(aggregator, stop=2)
    with pytest.raises(Refusal, match="steps of the state = 1 must be >= 2"):
        aggregator.load_state_dict(state)


def test_thresholds_that_see_raw_norms_have_no_epsilon():
    with pytest.raises(Refusal, match="a non-private threshold cannot meet an epsilon"):
        rounds.aggregator(ExactQuantile(0.5), noise_multiplier=None, epsilon=1.0)
    with pytest.raises(Refusal, match=r"one that needs no norms of all clients"):
        rounds.aggregator(ExactQuantile(0.5, over="dataset"))
    aggregator = rounds.aggregator(ExactQuantile(0.5))
    updates = [rounds.update_of(client) for client in aggregator.sample() if client > 5]
    aggregator.aggregate_stacked(rounds.stacked(updates))
    assert aggregator.epsilon() == math.inf
    _, norms = zip(*(rounds.clipped_alone(u, dict.fromkeys(u, 0), (1.0,)) for u in updates), strict=True)
    median = sorted(norm for (norm,) in norms)[(len(norms) - 1) // 2]
    assert aggregator.history[0].tau[0] == pytest.approx(median, rel=1e-6)
    with pytest.raises(Refusal, match="aggregate_stacked with one mapping"):
        aggregator.aggregate(updates)
    with pytest.raises(Refusal, match="not known before; read history"):
        aggregator.clip_norms  # noqa: B018
    aggregator.aggregate_stacked([])  # nobody: the last tau stays
    assert aggregator.history[1].tau == aggregator.history[0].tau
    rolling = rounds.aggregator(RollingQuantile(0.5))
    in_one_stack(rolling, updates)
    assert rolling.history[0].tau == aggregator.history[0].tau


def test_a_module_gives_its_trainable_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    aggregator = rounds.aggregator(like=model)
    assert set(aggregator.aggregate([])) == {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sent", [torch.float64, torch.float32, torch.bfloat16])
def test_other_precisions(recorder, dtype, sent):
    like = {"w": torch.zeros(8, dtype=dtype), "v": torch.zeros(300)}
    aggregator = rounds.aggregator(Constant(0.5), like=like)
    update = {"w": torch.ones(8, dtype=sent), "v": torch.ones(300, dtype=sent)}
    mean = aggregator.aggregate([update])
    assert {name: x.dtype for name, x in mean.items()} == {"w": dtype, "v": torch.float32}
    total = recorder.values[0].tensors
    norm = math.hypot(*(float(x.double().norm()) for x in total.values()))
    assert 0.5 * (1 - 1e-5) < norm <= 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"like": {}}, "like = {} must be a mapping with at least one tensor"),
        ({"like": {"n": torch.zeros(2, dtype=torch.long)}}, r"dtype of like\['n'\]"),
        ({"like": {"n": torch.zeros(0)}}, r"like\['n'\] has shape \(0,\)"),
        ({"cohort_size": 201}, "cohort_size = 201 must be <= num_clients = 200"),
        ({"cohort_size": 0}, "cohort_size = 0"),
        ({"rounds": 0}, "rounds = 0"),
        ({"num_clients": 2.5}, "num_clients = 2.5 must be a whole number"),
        ({"epsilon": 1.0}, "exactly one of epsilon and noise_multiplier"),
        ({"sampling": "poison"}, "did you mean 'poisson'"),
        ({"accountant": "moments"}, "accountant"),
        ({"groups": "per_layer"}, "did you mean 'per-layer'"),
        ({"noise_multiplier": 1000.0}, "noise on the unclipped fraction"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_arguments_are_refused_by_name(changes, message):
    with pytest.raises(Refusal, match=message):
        rounds.aggregator(**changes)


def test_malformed_is_refused_or_dropped_and_nothing_else():
    with pytest.raises(Refusal, match="malformed = 'skip' must be one of 'refuse', 'drop'"):
        rounds.aggregator().aggregate([], malformed="skip")


def test_history_is_public_and_released():
    aggregator = rounds.aggregator()
    finish(aggregator)
    assert [record.step for record in aggregator.history] == [0, 1, 2, 3]
    for record in aggregator.history:
        assert len(record.tau) == len(record.noisy_unclipped) == len(record.noise_power) == 1
    assert pickle.loads(pickle.dumps(aggregator.history)) == aggregator.history[:]


def test_global_generators_are_not_touched():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    finish(rounds.aggregator(seed=None))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002


def test_a_threshold_that_loses_its_quantile_is_warned_of_once():
    settings = {"num_clients": 60, "cohort_size": 30, "rounds": 60, "noise_multiplier": 0.1}
    aggregator = rounds.aggregator(PrivateQuantile(0.5, tau_min=0.05), **settings)
    zeros = {name: x * 0 for name, x in rounds.LIKE.items()}
    with pytest.warns(qclip.LostThreshold) as caught:  # noqa: PT031 - which round it is does not matter
        for _ in range(60):
            aggregator.aggregate([zeros for _ in aggregator.sample()])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "lower bound 0.05" in aggregator.lost_threshold


def test_the_package_is_lazy():
    assert qclip.federated.Aggregator is Aggregator

"""Flower: one reply for the inner strategy, nothing raw on any wire or record, resumed runs; in one process."""

import copy
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'qclip[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.supercore.task_identity import TaskIdentity

from federated import rounds
from integrations import flower_grid as made
from qclip import Refusal
from qclip.federated import answered
from qclip.federated.aggregator import MEDIAN
from qclip.integrations import flower
from qclip.integrations.flower import ANSWER, TERMS, UPDATE, PrivateMean
from qclip.thresholds import Constant, ExactQuantile, PrivateQuantile
from shards import every


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    be_the_server(monkeypatch)


def be_the_server(monkeypatch):
    """Messages name the task that makes them."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Spy(strategies.FedAvg):
    """FedAvg that keeps what it sees."""

    mean_based_state = ()

    def __init__(self, **options):
        super().__init__(fraction_evaluate=0.0, **options)
        self.replies, self.nodes = [], []

    def configure_train(self, server_round, arrays, config, grid):
        self.nodes.append(list(grid.get_node_ids()))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.replies += copy.deepcopy(replies)
        return super().aggregate_train(server_round, replies)


def averaging(**options):
    return strategies.FedAvg(fraction_evaluate=0.0, **options)


def numbers(record):
    """Every number of a nest of Flower's records, and every text."""
    match record:
        case Message():
            return numbers(record.content) if record.has_content() else [record.error.reason]
        case Array():
            return record.numpy().ravel().tolist()
        case dict() | ArrayRecord() | MetricRecord() | ConfigRecord() | RecordDict():
            return [value for item in record.values() for value in numbers(item)]
        case list() | tuple():
            return [value for item in record for value in numbers(item)]
        case _:
            return [record]


def expected(threshold=None, groups="flat", inner_rate=1.0, num_rounds=4, nodes=range(1000, 1040), **changes):
    """The run of the aggregator by itself."""
    aggregator = made.aggregator(threshold, groups, **changes)
    model = {name: x + 1.0 for name, x in made.LIKE.items()}
    for number in range(1, num_rounds + 1):
        drawn = [sorted(nodes)[k] for k in aggregator.sample(len(nodes))]
        replies = rounds.answers_of(aggregator, [made.change(node, number) for node in drawn])
        mean = aggregator.aggregate_answered(replies)
        model = {name: x + mean[name] for name, x in model.items()}
    return model, aggregator


RUNS = [(threshold, groups) for threshold in rounds.PRIVATE if threshold != "slack" for groups in ("flat", "per-layer")]


@pytest.mark.parametrize(("threshold", "groups"), every(3, RUNS, name="-".join))
def test_a_run_is_the_aggregators_run(threshold, groups):
    aggregator = made.aggregator(rounds.PRIVATE[threshold], groups)
    result = PrivateMean(averaging(), aggregator).start(made.LocalGrid(made.app()), made.arrays(), num_rounds=4)
    model, alone = expected(rounds.PRIVATE[threshold], groups)
    state = result.arrays.to_torch_state_dict()
    for name, x in model.items():
        # The app adds the update to the model and the mod subtracts the model, which rounds.
        assert torch.allclose(state[name], x, atol=1e-5)
    assert state["steps"] == 5
    assert state["steps"].dtype == torch.long
    for record, other in zip(aggregator.history, alone.history, strict=True):
        assert record.tau == pytest.approx(other.tau, rel=1e-5)
    assert aggregator.epsilon() == alone.epsilon()
    metrics = result.train_metrics_clientapp[4]
    assert metrics["epsilon"] == aggregator.epsilon()
    assert metrics["clip-norm"] == list(aggregator.history[-1].tau)


@pytest.mark.parametrize("fails", [(), range(1010, 1030)])
def test_nothing_raw_leaves_a_client_or_reaches_the_inner_strategy(fails, caplog):
    """A client's metrics, its own records and its exceptions hold a number that is looked for everywhere else."""
    inner, grid = Spy(), made.LocalGrid(made.app(fails))
    with caplog.at_level(logging.INFO):
        strategy = PrivateMean(inner, made.aggregator())
        result = strategy.start(grid, made.arrays(), num_rounds=4)
    secrets = {str(made.SECRET + k) for k in range(5)} | {str(made.SECRET + 0.5)}
    terms = [message.content[TERMS]["terms"] for message in grid.sent]
    for reply in grid.received:
        if reply.has_error():
            assert reply.error.reason == "the client failed; its own log says why"
            continue
        assert list(reply.content) == [UPDATE]
        assert set(reply.content[UPDATE]) == {*made.LIKE, ANSWER}
    for message in grid.sent:
        assert set(message.content) == {"arrays", "config", TERMS}
        assert set(message.content[TERMS]) == {"terms"}
    assert len(inner.replies) == 4
    for reply in inner.replies:
        assert set(reply.content) == {"arrays", "metrics"}
        assert dict(reply.content["metrics"]) == {"num-examples": 1.0}
        assert reply.metadata.src_node_id in (0, 1)  # a stand-in
    assert all(nodes == [0, 1] for nodes in inner.nodes)
    for metrics in result.train_metrics_clientapp.values():
        assert set(metrics) == {"clip-norm", "epsilon", "noisy-unclipped"}
    seen = [grid.sent, grid.received, inner.replies, result.arrays, result.train_metrics_clientapp, terms]
    texts = {str(value) for value in numbers(seen)}
    assert not secrets & texts
    assert not any(secret in text for secret in secrets for text in texts)
    # The server's log: nothing of a client, and not how many there were. The client's own log may quote exceptions.
    servers = [
        record.getMessage() for record in caplog.records if "client's training failed" not in record.getMessage()
    ]
    assert not any(secret in line for secret in secrets for line in servers)
    assert {line for line in servers if "Received" in line} == {"aggregate_train: Received 1 results and 0 failures"}
    assert {line for line in servers if "Sampled" in line} == {"configure_train: Sampled 2 nodes (out of 2)"}


def test_what_the_strategy_shows_is_the_same_whoever_replied(monkeypatch):
    """Replay: with the releases of one run, a run with other clients shows the inner strategy and the logs the same."""

    def run(released, **grid):
        inner, aggregator = Spy(), made.aggregator()
        found = []
        real = aggregator.aggregate_answered

        def replayed(replies, **options):
            mean = real(replies, **options)
            if released is None:
                found.append((mean, aggregator._records[-1], aggregator._threshold_state))
                return mean
            mean, aggregator._records[-1], aggregator._threshold_state = released[len(found)]
            found.append(None)
            return mean

        monkeypatch.setattr(aggregator, "aggregate_answered", replayed)
        result = PrivateMean(inner, aggregator).start(made.LocalGrid(made.app(), **grid), made.arrays(), num_rounds=4)
        return found, numbers([inner.replies, result.arrays, result.train_metrics_clientapp])

    released, whole = run(None)
    for grid in ({"lost": range(1000, 1020)}, {"nodes": range(1000, 1025)}, {"alter": lambda node, reply: []}):
        assert run(released, **grid)[1] == whole


def test_cohorts_are_poisson_over_the_connected_nodes():
    """Of 25 nodes each is asked half the time, whether 25, 40 or 10 are planned for: 60 rounds, five errors."""
    for planned in (10, 25, 40):
        changes = {"num_clients": planned, "cohort_size": planned // 2 if planned > 10 else 5, "rounds": 60}
        grid = made.LocalGrid(made.app(), nodes=range(1000, 1025), lost=range(1000, 1025))
        aggregator = made.aggregator(Constant(1.0), noise_multiplier=0, **changes)
        PrivateMean(averaging(), aggregator).start(grid, made.arrays(), num_rounds=60)
        times = np.bincount([message.metadata.dst_node_id - 1000 for message in grid.sent], minlength=25)
        rate = changes["cohort_size"] / planned
        assert abs(times.sum() / (60 * 25) - rate) < 5 * 0.5 / math.sqrt(60 * 25)
        assert abs(times - 60 * rate).max() < 5 * 0.5 * math.sqrt(60)


def test_an_empty_cohort_is_noise_alone():
    grid = made.LocalGrid(made.app(), nodes=range(1000, 1040))
    aggregator = made.aggregator(num_clients=40_000, cohort_size=20, rounds=2)
    aggregator._sampling_seed = np.random.SeedSequence(0)
    result = PrivateMean(averaging(), aggregator).start(grid, made.arrays(), num_rounds=2)
    assert grid.sent == []
    assert aggregator.round == 2
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


def bad(kind):
    """A reply as a hostile or broken client would send it."""

    def alter(node, reply):
        if node != 1025 or reply.has_error():
            return [reply]
        record = dict(reply.content[UPDATE])
        match kind:
            case "nothing":
                content = RecordDict()
            case "twice":
                return [reply, copy.deepcopy(reply)]
            case "objects":
                record["layer.bias"] = Array("object", (3,), "numpy.ndarray", b"\x93NUMPY broken")
                content = RecordDict({UPDATE: ArrayRecord(record)})
            case "integers":
                record["layer.bias"] = Array(np.ones(3, dtype=np.int64))
                content = RecordDict({UPDATE: ArrayRecord(record)})
            case "no answer":
                del record[ANSWER]
                content = RecordDict({UPDATE: ArrayRecord(record)})
            case "whole model":
                content = RecordDict({"arrays": made.arrays(), "metrics": MetricRecord({"num-examples": 7})})
            case "two records":
                content = RecordDict({UPDATE: ArrayRecord(record), "more": ArrayRecord(record)})
            case "another node":
                content, node = reply.content, 999
        return [Message(content, reply_to=Message(RecordDict(), dst_node_id=node, message_type="train"))]

    return alter


@pytest.mark.parametrize(
    "kind", ["nothing", "objects", "integers", "no answer", "whole model", "two records", "another node"]
)
def test_a_reply_that_cannot_be_read_never_came(kind):
    """Also: the round goes on."""
    results = []
    for options in ({"alter": bad(kind)}, {"lost": [1025]}):
        aggregator = made.aggregator(num_clients=40, cohort_size=39)
        result = PrivateMean(averaging(), aggregator).start(
            made.LocalGrid(made.app(), **options), made.arrays(), num_rounds=2
        )
        results.append(numbers([result.arrays, result.train_metrics_clientapp]))
    assert results[0] == results[1]


def test_a_node_counts_once():
    results = []
    for options in ({"alter": bad("twice")}, {}):
        aggregator = made.aggregator(num_clients=40, cohort_size=39)
        result = PrivateMean(averaging(), aggregator).start(
            made.LocalGrid(made.app(), **options), made.arrays(), num_rounds=2
        )
        results.append(numbers(result.arrays))
    assert results[0] == results[1]


def test_the_server_does_not_trust_the_clients_clipping(recorder, monkeypatch):
    """A client without the mod's clipping moves the sum by its bound, not by what it sends."""

    be_the_server(monkeypatch)  # the recorder has undone it

    def loud(node, reply):
        record = {name: Array(1e6 * (1 + np.abs(array.numpy()))) for name, array in reply.content[UPDATE].items()}
        reply.content[UPDATE] = ArrayRecord(record)
        return [reply] if node == 1025 else []

    aggregator = made.aggregator(num_clients=40, cohort_size=39)
    PrivateMean(averaging(), aggregator).start(made.LocalGrid(made.app(), alter=loud), made.arrays(), num_rounds=1)
    for value in recorder.values:
        squares = [0.0] * len(value.group_bounds)
        for key, x in value.tensors.items():
            squares[value.members[key]] += float(x.double().square().sum())
        for square, bound in zip(squares, value.group_bounds, strict=True):
            assert 0.9 * bound < math.sqrt(square) <= bound * (1 + 1e-6)


INNER = {
    "FedAvg": averaging,
    "FedProx": lambda: strategies.FedProx(fraction_evaluate=0.0, proximal_mu=0.1),
    "FedAvgM": lambda: strategies.FedAvgM(fraction_evaluate=0.0, server_momentum=0.9),
    "FedAdagrad": lambda: strategies.FedAdagrad(fraction_evaluate=0.0),
    "FedAdam": lambda: strategies.FedAdam(fraction_evaluate=0.0),
    "FedYogi": lambda: strategies.FedYogi(fraction_evaluate=0.0),
}


@pytest.mark.parametrize("name", INNER)
def test_a_resumed_run_is_the_run(name, tmp_path):
    whole = made.aggregator()
    result = PrivateMean(INNER[name](), whole).start(made.LocalGrid(made.app()), made.arrays(), num_rounds=4)
    path = tmp_path / "run.pt"
    PrivateMean(INNER[name](), made.aggregator(), path=path).start(
        made.LocalGrid(made.app()), made.arrays(), num_rounds=2
    )
    evaluated = []
    resumed = made.aggregator(seed=99)
    other = PrivateMean(INNER[name](), resumed, path=path).start(
        made.LocalGrid(made.app()), made.arrays(), num_rounds=4,
        evaluate_fn=lambda number, arrays: evaluated.append(number),
    )  # fmt: skip
    assert numbers(other.arrays) == numbers(result.arrays)
    assert resumed.history == whole.history
    assert list(other.train_metrics_clientapp) == [3, 4]
    assert evaluated == [2, 3, 4]
    again = PrivateMean(INNER[name](), made.aggregator(), path=path)
    assert numbers(again.start(made.LocalGrid(made.app()), made.arrays(), num_rounds=4).arrays) == numbers(
        result.arrays
    )
    if name == "FedAvg":
        with pytest.raises(PrivacyBudgetExhausted, match="all 4 rounds of the plan are done, at epsilon = "):
            again.start(made.LocalGrid(made.app()), made.arrays(), num_rounds=5)


def test_a_round_is_saved_before_its_mean_leaves(tmp_path):
    """Whatever fails afterwards, the round is not released again."""

    class Failing(PrivateMean):
        def aggregate_train(self, server_round, replies):
            super().aggregate_train(server_round, replies)
            raise KeyboardInterrupt

    path, first = tmp_path / "run.pt", made.aggregator(seed=None)
    with pytest.raises(KeyboardInterrupt):
        Failing(averaging(), first, path=path).start(made.LocalGrid(made.app()), made.arrays(), num_rounds=4)
    second = made.aggregator(seed=None)
    PrivateMean(averaging(), second, path=path).start(made.LocalGrid(made.app()), made.arrays(), num_rounds=2)
    assert second.history[:1] == first.history[:]
    assert second.round == 2


def test_another_run_is_not_resumed(tmp_path):
    path = tmp_path / "run.pt"
    PrivateMean(averaging(), made.aggregator(), path=path).start(
        made.LocalGrid(made.app()), made.arrays(), num_rounds=1
    )
    grid = made.LocalGrid(made.app())
    with pytest.raises(Refusal, match=r"^plan\['noise_multiplier'\]"):
        PrivateMean(averaging(), made.aggregator(noise_multiplier=0.6), path=path).start(grid, made.arrays())
    with pytest.raises(Refusal, match=r"^inner = 'FedAdam' must be 'FedAvg', as in the checkpoint"):
        PrivateMean(INNER["FedAdam"](), made.aggregator(), path=path).start(grid, made.arrays())
    with pytest.raises(Refusal, match=r"^initial_arrays"):
        PrivateMean(averaging(), made.aggregator(), path=path).start(grid, ArrayRecord({"w": torch.zeros(2)}))
    assert grid.sent == []


def test_the_end_of_the_plan_ends_the_run():
    grid, aggregator = made.LocalGrid(made.app()), made.aggregator(rounds=2)
    with pytest.raises(PrivacyBudgetExhausted, match="plan more rounds from the start"):
        PrivateMean(averaging(), aggregator).start(grid, made.arrays(), num_rounds=3)
    assert aggregator.round == 2
    assert {message.content["config"]["server-round"] for message in grid.sent} == {1, 2}


NO_MEAN = [
    strategies.Krum, strategies.MultiKrum, strategies.Bulyan, strategies.FedMedian, strategies.FedTrimmedAvg,
    strategies.QFedAvg, strategies.FedXgbBagging, strategies.FedXgbCyclic,
]  # fmt: skip


@pytest.mark.parametrize("kind", NO_MEAN, ids=lambda kind: kind.__name__)
def test_strategies_that_are_no_function_of_the_mean_are_refused(kind):
    inner = kind.__new__(kind)  # with whatever arguments
    with pytest.raises(Refusal, match=f"inner = '{kind.__name__}' must be one of FedAvg, .* functions of the mean"):
        PrivateMean(inner, made.aggregator())


def test_every_other_strategy_is_refused():
    class Unknown(strategies.FedAvg):
        pass

    class OfADeclared(Spy):
        """It does not inherit the declaration."""

    wrapped = strategies.DifferentialPrivacyServerSideFixedClipping(averaging(), 1.0, 1.0, 10)
    for inner in (Unknown(fraction_evaluate=0.0), OfADeclared(), wrapped):
        with pytest.raises(Refusal, match="declare mean_based_state on its class"):
            PrivateMean(inner, made.aggregator())


@pytest.mark.parametrize(
    ("inner", "aggregator", "message"),
    [
        ({"fraction_evaluate": 0.5}, {}, r"inner.fraction_evaluate = 0.5 must be 0; the clients' metrics are raw"),
        ({"fraction_train": 0.5}, {}, r"inner.fraction_train = 0.5 must be 1; the aggregator draws the cohorts"),
        ({}, {"threshold": ExactQuantile(0.5)}, "threshold = 'ExactQuantile' must be known before the round"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(inner, aggregator, message):
    with pytest.raises(Refusal, match=message):
        PrivateMean(strategies.FedAvg(**({"fraction_evaluate": 0.0} | inner)), made.aggregator(**aggregator))


def test_a_model_without_the_aggregators_arrays_is_refused():
    with pytest.raises(Refusal, match=r"\['layer.weight'\] are missing"):
        PrivateMean(averaging(), made.aggregator()).start(
            made.LocalGrid(made.app()), ArrayRecord({"layer.bias": torch.zeros(3)})
        )


def test_the_mod_refuses_a_server_that_does_not_clip(caplog):
    grid = made.LocalGrid(made.app())
    with caplog.at_level(logging.ERROR):
        inner = averaging()
        messages = list(inner.configure_train(1, made.arrays(), ConfigRecord(), grid))
        replies = list(grid.send_and_receive(messages[:1]))
    assert replies[0].has_error()
    assert "run the server with qclip.integrations.flower.PrivateMean" in caplog.text


def test_the_mod_hides_the_reason_of_an_apps_own_error():
    messages = []

    def remember(message, context):
        messages.append(message)
        return Message(Error(2, f"the label {made.SECRET} is not known"), reply_to=message)

    grid = made.LocalGrid(lambda message, context: flower.clipping_mod(message, context, remember))
    PrivateMean(averaging(), made.aggregator()).start(grid, made.arrays(), num_rounds=1)
    assert messages
    assert {reply.error.reason for reply in grid.received} == {"the client failed; its own log says why"}


def test_the_mod_lets_other_messages_pass():
    reply = object()
    message = Message(RecordDict(), dst_node_id=1, message_type="evaluate")
    assert flower.clipping_mod(message, None, lambda message, context: reply) is reply


def test_the_mod_clips_training_by_any_name():
    message = Message(RecordDict(), dst_node_id=1, message_type="train.other")
    assert flower.clipping_mod(message, None, lambda message, context: message).has_error()


def test_the_answer_is_one_more_array():
    aggregator = made.aggregator(PrivateQuantile(0.5, initial=0.5), "per-layer")
    grid = made.LocalGrid(made.app())
    PrivateMean(averaging(), aggregator).start(grid, made.arrays(), num_rounds=1)
    lengths = {reply.content[UPDATE][ANSWER].numpy().shape for reply in grid.received}
    assert lengths == {(2,)}  # both tensors are one layer: a count and a slack


def far_off(initial, seed, *, ours):
    """The threshold after 20 rounds of cohorts of 100 whose norms have median 1, at noise multiplier 1."""
    generator = torch.Generator().manual_seed(1000 + seed)
    like, cohort, num_rounds = {"w": torch.zeros(50)}, 100, 20

    def update():
        direction = torch.randn(50, generator=generator)
        return direction / direction.norm() * (0.5 * torch.randn((), generator=generator)).exp()

    before = ArrayRecord({"w": torch.zeros(50)})
    if ours:
        median = replace(MEDIAN, initial=initial)
        aggregator = made.aggregator(
            median, like=like, num_clients=1000, cohort_size=cohort, rounds=num_rounds + 1, noise_multiplier=1.0,
            seed=seed,
        )  # fmt: skip
        strategy, grid = PrivateMean(averaging(), aggregator), made.LocalGrid(None, nodes=range(1000))

        def content_of(update):
            clipped, answer = answered({"w": update}, aggregator.terms)
            return RecordDict({UPDATE: ArrayRecord({"w": clipped["w"], ANSWER: answer})})
    else:
        np.random.seed(seed)  # noqa: NPY002 - Flower draws its noise from it
        strategy = strategies.DifferentialPrivacyServerSideAdaptiveClipping(averaging(), 1.0, cohort, initial)

        def content_of(update):
            weight = MetricRecord({"num-examples": 1})
            return RecordDict({"arrays": ArrayRecord({"w": update}), "metrics": weight})

    for number in range(1, num_rounds + 1):
        if ours:
            asked = list(strategy.configure_train(number, before, ConfigRecord(), grid))
        else:
            strategy.current_arrays = before
            asked = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in range(cohort)]
        strategy.aggregate_train(number, [Message(content_of(update()), reply_to=message) for message in asked])
    return aggregator.clip_norms[0] if ours else float(strategy.clipping_norm)


@pytest.mark.slow
@pytest.mark.parametrize("initial", [0.01, 100.0])
def test_flowers_own_adaptive_clipping_beside_ours(initial, caplog):
    """Ours ends within a fifth of the median. Flower 1.41's moves away from it: its sign is inverted.

    When the second half fails, Flower has repaired it: correct docs/federated.md.
    """
    caplog.set_level(logging.ERROR)
    ours = [far_off(initial, seed, ours=True) for seed in range(3)]
    flowers = [far_off(initial, seed, ours=False) for seed in range(3)]
    print(
        f"\nfrom {initial}: ours {min(ours):.2f} to {max(ours):.2f}, Flower's {min(flowers):.2g} to {max(flowers):.2g}"
    )
    assert all(abs(tau - 1) <= 0.2 for tau in ours)
    assert all(abs(math.log(tau)) > abs(math.log(initial)) for tau in flowers)

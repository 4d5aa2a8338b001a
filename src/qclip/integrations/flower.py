"""Flower: a strategy that gives another one the private mean of the clients' updates, and the mod of its clients.

`PrivateMean` runs on the server around FedAvg, FedAdam or another function of the mean; `clipping_mod` runs at every
client. This is central differential privacy: the server sees each clipped update, and the client's answer to the
question of the threshold. See docs/federated.md.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from qclip import _validate as check
from qclip.federated import Aggregator, Terms, answered
from qclip.training import checkpoint

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid
    from flwr.serverapp.exception import PrivacyBudgetExhausted
    from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Result, Strategy
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("flwr is not installed; pip install 'qclip[flower]'") from missing

__all__ = ["PrivateMean", "clipping_mod"]

TERMS: Final = "qclip.terms"
"""The name of the config record with the terms of a round, in the message to a client."""
UPDATE: Final = "qclip.update"
"""The name of the only record in a client's reply."""
ANSWER: Final = "qclip.answer"
"""The name of the answer among the arrays of that record."""
MEAN_BASED: Final[Mapping[type[Strategy], tuple[str, ...]]] = {
    FedAvg: (),
    FedProx: (),
    FedAvgM: ("momentum_vector",),
    FedAdagrad: ("m_t", "v_t"),
    FedAdam: ("m_t", "v_t"),
    FedYogi: ("m_t", "v_t"),
}
"""The strategies of Flower that are functions of the mean, and the attributes that they keep from round to round."""
DECLARATION: Final = "mean_based_state"
"""The class attribute by which another strategy declares that it is one, with the names of such attributes."""
log = logging.getLogger("qclip.federated")


def clipping_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Clip what the client has learnt, and let nothing else leave it: ``ClientApp(mods=[clipping_mod])``.

    As the first of several mods it is the last to see the reply.

    The app trains the arrays that it was sent and replies with them under the same names, as ever. The mod sends their
    clipped change instead, with the answer to the threshold's question as one more array.

    Guarantees:
        * The reply to a training message holds the clipped update and the answer, and nothing else: no metrics, no
          number of examples, no other records.
        * An error reply gives no reason: exceptions may quote data. The traceback is in the client's own log.

    Edge cases:
        * A message without `PrivateMean`'s terms, and a reply without the arrays that were sent, end in an error.
        * Other messages than those of training pass unchanged. `PrivateMean` sends none.

    Args:
        message: The message of the server.
        context: The context of the client.
        call_next: The app, or the next mod.
    """
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    try:
        content = message.content
        if TERMS not in content.config_records:
            remedy = "run the server with qclip.integrations.flower.PrivateMean"
            raise check.refuse("message", sorted(content), f"one with {TERMS!r}", remedy)
        terms = Terms.from_json(str(content.config_records[TERMS]["terms"]))
        before = _tensors(_only(content.array_records), terms.members)
        message.content = RecordDict({name: record for name, record in content.items() if name != TERMS})
        reply = call_next(message, context)
        if reply.has_error():
            return _failure(message)
        after = _tensors(_only(reply.content.array_records), terms.members)
        clipped, answer = answered({name: after[name] - x for name, x in before.items()}, terms)
    except Exception:
        log.exception("the client's training failed; the server is told that it failed, and no more")
        return _failure(message)
    record = ArrayRecord({name: Array(x.numpy()) for name, x in {**clipped, ANSWER: answer}.items()})
    return Message(RecordDict({UPDATE: record}), reply_to=message)


class PrivateMean(Strategy):
    """Gives a strategy one reply, the private mean of the clients' models, as if one client had sent it.

        aggregator = qclip.federated.Aggregator(
            arrays.to_torch_state_dict(), num_clients=1000, cohort_size=100, rounds=50, epsilon=8, delta=1e-5
        )
        strategy = PrivateMean(FedAvg(fraction_evaluate=0), aggregator, path="run.pt")
        result = strategy.start(grid, arrays, num_rounds=50)

    Guarantees:
        * All that the inner strategy, the result and the logs see of the clients follows from the aggregator's
          releases: no reply, no metric, no number of examples, no node, and not how many replied.
        * Every connected node is asked with probability ``cohort_size / num_clients``, by the aggregator's own secret
          random numbers, not by those of the inner strategy or of Python.
        * A client is not trusted: its update and its answer are clipped again, only the first reply of a node that was
          asked counts, and a reply that cannot be read is one that never came. So are errors.
        * When the plan is used up, Flower's `PrivacyBudgetExhausted` ends the run before any client is asked.
        * With ``path``, each round is saved before its mean leaves the strategy, and `start` goes on from the file.

    Edge cases:
        * ``num_clients`` is public and may differ from the number of connected nodes. Fewer: the sum holds fewer
          updates, and is divided by the planned cohort all the same. More: the sum holds more. Epsilon is that of the
          plan in both cases, because each node joins with the planned probability.
        * Nobody is drawn, or nobody replies: the mean is noise alone.
        * Arrays that the aggregator's ``like`` does not have, such as counters, stay as they are.
        * A client is a node. Someone who runs several nodes is protected as that many clients.

    Args:
        inner: A strategy that is a function of the mean: FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam or FedYogi, with
            ``fraction_train=1`` (the aggregator draws the cohorts) and ``fraction_evaluate=0`` (the clients' metrics
            are raw; pass ``evaluate_fn`` to `start` for public data). One of another class must declare that it is one
            by a class attribute, ``mean_based_state``, with the names of what it keeps from round to round.
        aggregator: The aggregator of the run.
        path: The file to save each round to, and to resume from if it exists. Keep it secret until the run is complete.

    Raises:
        qclip.Refusal: For a strategy that is no function of the mean (Krum, medians, trimmed means, ...), and for a
            threshold that sees raw norms.
    """

    def __init__(self, inner: Strategy, aggregator: Aggregator, *, path: str | os.PathLike[str] | None = None) -> None:
        self._kept = _kept_attributes(inner)
        for name, needed, remedy in (
            ("fraction_train", 1.0, "the aggregator draws the cohorts"),
            ("fraction_evaluate", 0.0, "the clients' metrics are raw; pass evaluate_fn to start for public data"),
        ):
            if (value := getattr(inner, name, needed)) != needed:
                raise check.refuse(f"inner.{name}", value, f"{needed:g}", remedy)
        if not aggregator.threshold.private:
            remedy = "take a private one, such as qclip.PrivateQuantile"
            raise check.refuse("threshold", type(aggregator.threshold).__name__, "known before the round", remedy)
        self.inner, self.aggregator = inner, aggregator
        self._path = None if path is None else Path(path)
        self._asked: set[int] = set()
        self._before = ArrayRecord()
        self._template: Message | None = None

    def summary(self) -> None:
        """Log the plan and the summary of the inner strategy."""
        plan = self.aggregator.plan
        log.info("%s of %s: %s", type(self).__name__, type(self.inner).__name__, plan)
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds up to ``num_rounds``, those of a saved run included.

        The arguments are those of Flower's own strategies.

        Raises:
            flwr.serverapp.exception.PrivacyBudgetExhausted: If ``num_rounds`` is beyond the plan, after its last round.
            qclip.Refusal: If the saved run is another one, before anything is loaded.
        """
        arrays = self._resumed(initial_arrays)
        done = self.aggregator.round

        evaluate = None if evaluate_fn is None else lambda number, arrays: evaluate_fn(done + number, arrays)
        result = super().start(
            grid, arrays, max(0, num_rounds - done), timeout, train_config, evaluate_config, evaluate
        )
        if len(result.arrays) == 0:
            result.arrays = arrays
        for metrics in (result.train_metrics_clientapp, result.evaluate_metrics_serverapp):
            shifted = {done + number: record for number, record in metrics.items()}
            metrics.clear()
            metrics.update(shifted)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages to the nodes that the aggregator draws, with what the inner strategy sends to each."""
        aggregator = self.aggregator
        if aggregator.finished:
            raise PrivacyBudgetExhausted(
                f"all {aggregator.plan.rounds} rounds of the plan are done, at epsilon = {aggregator.epsilon():.4g}: "
                "plan more rounds from the start, because the noise was chosen for this many"
            )
        terms = aggregator.terms
        _tensors(arrays, terms.members)
        self._before, self._template = arrays, self._configured(arrays, config)
        nodes = self._connected(grid)
        drawn = [nodes[k] for k in aggregator.sample(len(nodes))]
        self._asked = set(drawn)
        content = RecordDict(dict(self._template.content.items()))
        content[TERMS] = ConfigRecord({"terms": terms.to_json()})
        message_type = self._template.metadata.message_type
        return [Message(content, dst_node_id=node, message_type=message_type) for node in drawn]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Release the private mean of the replies, and return what the inner strategy makes of it; save the round."""
        if self._template is None:
            remedy = "call start, which calls configure_train before"
            raise check.refuse("aggregate_train", server_round, "called after configure_train", remedy)
        mean = self.aggregator.aggregate_answered(self._read(replies), malformed="drop")
        before = _tensors(self._before, mean)
        moved = {name: (x + mean[name].cpu()).to(x.dtype) for name, x in before.items()}
        arrays, _ = self.inner.aggregate_train(self.aggregator.round, [self._only_reply(moved)])
        arrays = self._before if arrays is None else self._restored(arrays, before)
        self._save(arrays)  # before the mean leaves: a resumed run must not release this round again
        self._template = None
        record = self.aggregator.history[-1]
        public: dict[str, Any] = {"clip-norm": list(record.tau), "epsilon": self.aggregator.epsilon()}
        if record.noisy_unclipped:
            public["noisy-unclipped"] = list(record.noisy_unclipped)
        return arrays, MetricRecord(public)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no message: what clients would reply is raw."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing, whatever the replies."""
        return None

    def _configured(self, arrays: ArrayRecord, config: ConfigRecord) -> Message:
        """Return the message that the inner strategy sends to each node. It sees none of the real ones."""
        known = range(max(1, getattr(self.inner, "min_available_nodes", 1), getattr(self.inner, "min_train_nodes", 1)))
        stand_in = cast(Grid, SimpleNamespace(get_node_ids=lambda: known))
        messages = list(self.inner.configure_train(self.aggregator.round + 1, arrays, config, stand_in))
        if not messages:
            remedy = "take a strategy that trains on all nodes"
            raise check.refuse("inner", type(self.inner).__name__, "one that configures a round of training", remedy)
        return messages[0]

    def _connected(self, grid: Grid) -> list[int]:
        """Return the connected nodes, in a fixed order; wait for as many as the inner strategy wants at least."""
        needed = getattr(self.inner, "min_available_nodes", 1)
        while len(nodes := sorted(grid.get_node_ids())) < needed:
            log.info("waiting for at least %d nodes", needed)
            time.sleep(1)
        return nodes

    def _read(self, replies: Iterable[Message]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the update and the answer of each node that was asked and replied with them, once for each node."""
        waited_for = set(self._asked)
        for reply in replies:
            if reply.has_error() or (node := reply.metadata.src_node_id) not in waited_for:
                continue
            waited_for.remove(node)
            try:
                record = _only(reply.content.array_records)
                tensors = {name: _tensor(array) for name, array in record.items()}
                answer = tensors.pop(ANSWER)
            except Exception as reason:
                log.debug("a reply was dropped: %s", reason)
                continue
            yield tensors, answer

    def _only_reply(self, moved: Mapping[str, Tensor]) -> Message:
        """Return the message with the private mean, the only one that the inner strategy ever gets."""
        assert self._template is not None
        arrays = {name: Array(moved[name].numpy()) if name in moved else x for name, x in self._before.items()}
        weight = MetricRecord({getattr(self.inner, "weighted_by_key", "num-examples"): 1.0})
        content = {getattr(self.inner, "arrayrecord_key", "arrays"): ArrayRecord(arrays), "metrics": weight}
        return Message(RecordDict(content), reply_to=self._template)

    def _restored(self, arrays: ArrayRecord, before: Mapping[str, Tensor]) -> ArrayRecord:
        """Return the new arrays in the dtypes of the old ones; those that are not trained, as they were."""
        new = {name: Array(_tensor(arrays[name]).to(x.dtype).numpy()) for name, x in before.items()}
        return ArrayRecord({name: new.get(name, x) for name, x in self._before.items()})

    def _save(self, arrays: ArrayRecord) -> None:
        if self._path is None:
            return
        kept = {name: _to_tensors(getattr(self.inner, name)) for name in self._kept}
        content = {
            "aggregator": self.aggregator.state_dict(),
            "arrays": {name: _tensor(array) for name, array in arrays.items()},
            "inner": {"class": type(self.inner).__name__, "state": kept},
        }
        checkpoint.write(self._path, content)

    def _resumed(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays to begin with: those of the saved run, which is loaded, or the initial ones."""
        if self._path is None or not self._path.exists():
            return initial_arrays
        content = checkpoint.read(self._path)
        name, saved = type(self.inner).__name__, content["inner"]["class"]
        if name != saved:
            remedy = "wrap the same strategy, or save to another file"
            raise check.refuse("inner", name, f"{saved!r}, as in the checkpoint", remedy)
        shapes = {name: tuple(_tensor(array).shape) for name, array in initial_arrays.items()}
        if shapes != {name: tuple(x.shape) for name, x in content["arrays"].items()}:
            remedy = "start with arrays of the same model, or save to another file"
            raise check.refuse("initial_arrays", shapes, "of the shapes in the checkpoint", remedy)
        self.aggregator.load_state_dict(content["aggregator"])
        for attribute in self._kept:
            setattr(self.inner, attribute, _to_arrays(content["inner"]["state"][attribute]))
        return ArrayRecord({name: Array(x.numpy()) for name, x in content["arrays"].items()})


def _kept_attributes(inner: Strategy) -> tuple[str, ...]:
    """Return the attributes that a strategy keeps from round to round; refuse one that is no function of the mean."""
    declared = vars(type(inner)).get(DECLARATION)  # not inherited: a subclass may do something else with the replies
    if declared is None and type(inner) not in MEAN_BASED:
        names = ", ".join(strategy.__name__ for strategy in MEAN_BASED)
        remedy = f"it gets one reply, the private mean; declare {DECLARATION} on its class if that is all it needs"
        raise check.refuse("inner", type(inner).__name__, f"one of {names}, which are functions of the mean", remedy)
    return MEAN_BASED[type(inner)] if declared is None else tuple(declared)


def _failure(message: Message) -> Message:
    reason = "the client failed; its own log says why"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _only(records: Mapping[str, ArrayRecord]) -> ArrayRecord:
    if len(records) != 1:
        raise check.refuse("array records", sorted(records), "exactly one", "send the model in one record")
    return next(iter(records.values()))


def _tensors(record: ArrayRecord, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the arrays of these names as tensors of their own."""
    if unknown := sorted(set(names) - set(record)):
        remedy = "send and return the whole model, under the names that the aggregator was made with"
        raise check.refuse("arrays", sorted(record), f"complete; {unknown} are missing", remedy)
    return {name: _tensor(record[name]) for name in names}


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array.numpy()))


def _to_tensors(value: Any) -> Any:
    """Return a nest of arrays as tensors, which a checkpoint can hold."""
    match value:
        case np.ndarray():
            return torch.from_numpy(np.array(value))
        case dict():
            return {name: _to_tensors(item) for name, item in value.items()}
        case list() | tuple():
            return [_to_tensors(item) for item in cast(Sequence[Any], value)]
        case _:
            return value


def _to_arrays(value: Any) -> Any:
    """Return the value of which `_to_tensors` was taken."""
    match value:
        case Tensor():
            return value.numpy()
        case dict():
            return {name: _to_arrays(item) for name, item in value.items()}
        case list():
            return [_to_arrays(item) for item in value]
        case _:
            return value

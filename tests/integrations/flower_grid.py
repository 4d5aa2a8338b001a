"""Flower in one process: a grid whose nodes run the client's app at once, and keep what goes over the wire."""

import copy

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from federated import rounds
from qclip.federated import Aggregator
from qclip.integrations.flower import clipping_mod

SECRET = 271_828
"""What a client's metrics, states and exceptions are full of: the leak test looks for it."""
LIKE = {"layer.weight": torch.zeros(3, 4), "layer.bias": torch.zeros(3)}


def arrays():
    """A model, which has a counter, too, that is no part of an update."""
    return ArrayRecord({**{name: x + 1.0 for name, x in LIKE.items()}, "steps": torch.tensor(5)})


def aggregator(threshold=None, groups="flat", like=LIKE, **changes):
    given = {} if threshold is None else {"threshold": threshold}
    settings = {"num_clients": 40, "cohort_size": 20, "rounds": 4, "noise_multiplier": 0.5, "delta": 1e-3, "seed": 3}
    return Aggregator(like, groups=groups, **given, **(settings | changes))


def change(node, number, like=LIKE):
    """The update of a node in a round."""
    return rounds.update_of(node - 1000, number, like)


def app(fails=()):
    """An app that replies with the whole model, and with metrics that must not leave the client."""
    client = ClientApp(mods=[clipping_mod])

    @client.train()
    def train(message, context):
        state = message.content["arrays"].to_torch_state_dict()
        number = message.content["config"]["server-round"]
        if context.node_id in fails:
            raise RuntimeError(f"the label {SECRET} is not known")
        context.state["seen"] = MetricRecord({"value": SECRET + number})  # it stays
        update = change(context.node_id, number)
        after = {name: state[name] + update[name] for name in LIKE} | {"steps": state["steps"] + 1}
        metrics = MetricRecord({"num-examples": SECRET, "loss": SECRET + 0.5, "per-class": [SECRET, 1]})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    return client


class LocalGrid(Grid):
    """Runs the client's app at each node that is sent a message. Messages are copied, as on a wire."""

    def __init__(self, client, nodes=range(1000, 1040), *, lost=(), alter=None):
        self.client, self.nodes, self.lost, self.alter = client, list(nodes), set(lost), alter
        self.sent, self.received = [], []
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={}, series_id=0)
            for node in nodes
        }

    def get_node_ids(self):
        return reversed(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            self.sent.append(copy.deepcopy(message))
            node = message.metadata.dst_node_id
            if node in self.lost:
                replies.append(Message(Error(1, "the node is gone"), reply_to=message))
                continue
            reply = self.client(copy.deepcopy(message), self.contexts[node])
            self.received.append(copy.deepcopy(reply))
            replies += [reply] if self.alter is None else self.alter(node, reply)
        return replies

    def set_run(self, run):
        raise NotImplementedError

    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **options):
        raise NotImplementedError

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

"""The client: it trains as ever, and `clipping_mod` decides what leaves it."""

import io

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qclip
from digits_app.task import build_model, client_data
from qclip.integrations.flower import clipping_mod

app = ClientApp(mods=[clipping_mod])
STATE = "private-training"
BATCH_SIZE, STEPS = 16, 10
"""The expected batch, and the steps of a round, of training that is private for each example."""


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on the client's data; reply with all of it."""
    config = context.run_config
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = client_data(int(context.node_config["partition-id"]), int(config["num-clients"]))
    if float(config["example-noise"]) > 0:
        train_privately(model, data, context)
    else:
        train_plainly(model, data, epochs=int(config["local-epochs"]), lr=float(config["lr"]))
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)


def train_plainly(model: nn.Module, data: TensorDataset, *, epochs: int, lr: float) -> None:
    """Train by SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=BATCH_SIZE, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def train_privately(model: nn.Module, data: TensorDataset, context: Context) -> None:
    """Train with differential privacy for each example of this client, against the server as well.

    One private run goes through all rounds: its plan has the steps of all of them, and the client keeps its state, so
    that epsilon adds up. The state stays at the client.
    """
    config = context.run_config
    training = qclip.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=float(config["lr"])),
        data,
        loss=nn.CrossEntropyLoss(),
        batch_size=BATCH_SIZE,
        steps=STEPS * int(config["rounds"]),
        noise_multiplier=float(config["example-noise"]),
        delta=1e-4,
    )
    if STATE in context.state:
        saved = io.BytesIO(context.state[STATE]["state"])
        training.load_state_dict(torch.load(saved, weights_only=True))
    end = len(training.history) + STEPS
    for batch in training.loader:
        training.step(*batch)
        if len(training.history) == end and training.updated:
            break
    to_save = io.BytesIO()
    torch.save(training.state_dict(), to_save)
    context.state[STATE] = ConfigRecord(
        {"state": to_save.getvalue(), "steps": len(training.history), "epsilon": training.epsilon()}
    )

"""The model, and the data of each client and of the server."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def build_model() -> nn.Module:
    """Return the model, with the same initial weights everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def digits() -> tuple[Tensor, Tensor]:
    """Return 64 grey values in [0, 1] and a label of each digit."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return x.float() / 16, y


def client_data(number: int, num_clients: int) -> TensorDataset:
    """Return the data of one client: its share of the digits, without those of the server."""
    x, y = digits()
    mine = (torch.arange(len(x)) % 6 != 0) & (torch.arange(len(x)) // 6 % num_clients == number)
    return TensorDataset(x[mine], y[mine])


def accuracy(model: nn.Module) -> float:
    """Return the accuracy on the server's data, every sixth digit: public, and nobody's."""
    x, y = digits()
    with torch.no_grad():
        return (model(x[::6]).argmax(1) == y[::6]).double().mean().item()

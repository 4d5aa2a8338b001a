"""`qclip.fix`: what cannot be private is replaced, weights stay the same parameters, and what is left is said."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.data import TensorDataset

import qclip
from qclip.engine import oracle
from qclip.engine.fix import num_groups

B = 5


def squared(outputs, targets):
    return (outputs - targets).square().sum(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Block(nn.Module):
    """A residual block of a small image model, as people write them."""

    def __init__(self, channels, norm):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1), norm

    def forward(self, x):
        return x + self.bn(self.conv(x)).relu()


class Images(nn.Module):
    """Nested layers, and a batch norm that two blocks share."""

    def __init__(self):
        super().__init__()
        shared = nn.BatchNorm2d(8)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU())
        self.blocks = nn.ModuleList([Block(8, shared), Block(8, shared)])
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def moved(model):
    """Move all parameters: those of a norm start at 1 and 0, where a copy could not be told from a new layer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images():
    return torch.randn(B, 3, 6, 6), torch.randn(B, 2)


def test_a_fixed_model_is_exact_and_the_same_but_for_its_statistics():
    model, (x, y) = moved(Images()).double(), [each.double() for each in images()]
    with pytest.raises(qclip.Refusal, match=r"call qclip\.fix\(model\), which replaces it by GroupNorm"):
        qclip.clipped_gradients(model, squared, x, y, 1.0)
    before = dict(model.named_parameters())
    assert qclip.fix(model) is model
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert not list(model.buffers())
    assert model.blocks[0].bn is model.blocks[1].bn
    assert (model.stem[1].num_groups, model.stem[1].eps, model.head[2].num_groups) == (2, 1e-3, 1)
    found = qclip.clipped_gradients(model, squared, x, y, 1.0)
    expected = oracle.clipped(model, lambda pair: squared(model(pair[0]), pair[1]), (x, y), 1.0)
    for name in before:
        torch.testing.assert_close(found.sums[name], expected.sums[name], rtol=1e-9, atol=1e-12)


def test_an_optimizer_made_before_still_has_all_parameters():
    model, (x, y) = Images(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = qclip.make_private(
        qclip.fix(model),
        optimizer,
        TensorDataset(x, y),
        loss=nn.MSELoss(),
        batch_size=2,
        steps=2,
        noise_multiplier=1.0,
        threshold=qclip.Constant(1.0),
    )
    before = model.stem[1].weight.clone()
    for batch in training.loader:
        training.step(*batch)
    assert not torch.equal(before, model.stem[1].weight)


def test_an_optimizer_of_other_parameters_is_told_why():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.GroupNorm(1, 2)  # by hand: the optimizer keeps the old parameters
    data = TensorDataset(torch.randn(9, 3), torch.randn(9, 2))
    with pytest.raises(qclip.Refusal, match=r"2 parameters that are not the model's.*made after layers were replaced"):
        qclip.make_private(model, optimizer, data, loss=nn.MSELoss(), batch_size=2, steps=2, noise_multiplier=1.0)


def test_it_says_what_it_did_and_does_nothing_the_second_time(caplog):
    model = Images()
    planned = qclip.fixes(model)
    assert [each.path for each in planned.replaced] == ["stem.1", "blocks.0.bn", "head.2"]
    assert isinstance(model.stem[1], nn.BatchNorm2d)  # nothing was done yet
    assert "stem.1       BatchNorm2d(8)  GroupNorm(2, 8)" in str(planned)
    assert '<td style="text-align: left">head.2</td>' in planned._repr_html_()
    qclip.fix(model)
    assert caplog.messages == [f"qclip.fix:\n{planned}"]
    assert caplog.records[0].levelno == logging.WARNING
    first = list(model.modules())
    assert str(qclip.fixes(model)) == "nothing to replace"
    assert list(qclip.fix(model).modules()) == first
    assert len(caplog.messages) == 1


LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(24), (24,), 1),
    "1d with positions": (lambda: nn.BatchNorm1d(24), (24, 7), 1),
    "2d": (lambda: nn.BatchNorm2d(24), (24, 3, 4), 6),
    "3d": (lambda: nn.BatchNorm3d(24), (24, 2, 3, 4), 6),
    "without running statistics": (lambda: nn.BatchNorm2d(24, track_running_stats=False), (24, 3, 4), 6),
    "without parameters": (lambda: nn.BatchNorm2d(24, affine=False), (24, 3, 4), 6),
    "frozen parameters": (lambda: nn.BatchNorm2d(24).requires_grad_(False), (24, 3, 4), 6),
    "a prime number of channels": (lambda: nn.BatchNorm2d(7), (7, 3, 4), 1),
    "float64": (lambda: nn.BatchNorm2d(24).double(), (24, 3, 4), 6),
    "synchronised": (lambda: nn.SyncBatchNorm(24), (24, 3, 4), 6),
    "in evaluation mode": (lambda: nn.BatchNorm2d(24).eval(), (24, 3, 4), 6),
}


@pytest.mark.parametrize(("make", "shape", "groups"), LAYERS.values(), ids=list(LAYERS))
def test_batch_norm_of_any_kind_becomes_group_norm(make, shape, groups):
    old = moved(make())
    new = qclip.fix(old)  # the model itself
    assert type(new) is nn.GroupNorm
    assert (new.num_groups, new.num_channels, new.eps, new.affine) == (groups, shape[0], old.eps, old.affine)
    assert (new.weight is old.weight, new.bias is old.bias, new.training) == (True, True, old.training)
    x = torch.randn(B, *shape, dtype=torch.float64 if new.affine and new.weight.dtype == torch.float64 else None)
    torch.testing.assert_close(new(x)[1:], new(x[1:]))  # no example depends on the others
    assert float(new(x).detach().std()) > 0.5


def test_groups_divide_the_channels_and_none_is_a_single_channel():
    for channels in range(1, 200):
        groups = num_groups(channels)
        assert channels % groups == 0
        assert groups == 1 or (channels // groups >= 4 and groups <= 32), channels


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_instance_norm_stops_to_track(dimensions):
    kind = getattr(nn, f"InstanceNorm{dimensions}d")
    model = nn.Sequential(kind(4, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(4 * 3**dimensions, 2))
    x, y = torch.randn(B, 4, *[3] * dimensions), torch.randn(B, 2)
    qclip.fix(moved(model))
    expected = kind(4, affine=True)
    expected.load_state_dict(model[0].state_dict())
    for mode in (True, False):
        torch.testing.assert_close(model[0].train(mode)(x), expected.train(mode)(x))
    qclip.clipped_gradients(model, squared, x, y, 1.0)
    assert str(qclip.fixes(model)) == "nothing to replace"


@pytest.mark.parametrize(
    ("lazy", "shape", "groups"),
    [(nn.LazyBatchNorm1d, (24,), 1), (nn.LazyBatchNorm2d, (24, 3, 3), 6), (nn.LazyBatchNorm3d, (7, 2, 2, 2), 1)],
)
@pytest.mark.parametrize("affine", [True, False])
def test_a_lazy_batch_norm_takes_its_channels_at_the_first_batch(lazy, shape, groups, affine):
    model = nn.Sequential(lazy(eps=1e-3, affine=affine))
    parameters = list(model.parameters())
    qclip.fix(model)
    model(torch.randn(B, *shape))
    assert type(model[0]) is nn.GroupNorm
    assert (model[0].num_groups, model[0].num_channels, model[0].eps) == (groups, shape[0], 1e-3)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    if affine:
        assert (model[0].weight.tolist(), model[0].bias.tolist()) == ([1.0] * shape[0], [0.0] * shape[0])
    copy.deepcopy(model)(torch.randn(B, *shape))


def test_hooks_and_their_handles_move_along():
    model, seen = nn.Sequential(nn.BatchNorm1d(4)), []
    handle = model[0].register_forward_hook(lambda layer, inputs, output: seen.append(type(layer)))
    qclip.fix(model)
    model(torch.randn(B, 4))
    assert seen == [nn.GroupNorm]
    handle.remove()
    model(torch.randn(B, 4))
    assert len(seen) == 1


def test_frozen_statistics_inside_a_training_model_are_kept():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    model[1].eval()
    assert [each.remark for each in qclip.fixes(model).left] == [
        "kept, in evaluation mode: call eval() on it after every train() of the model"
    ]
    qclip.fix(model)
    assert [type(layer) for layer in model[1:]] == [nn.BatchNorm2d, nn.GroupNorm]


class Activated(nn.BatchNorm2d):
    """As in libraries of image models: torch's own layer, with something behind it."""

    def forward(self, x):
        return super().forward(x).relu()


class Named(nn.BatchNorm2d):
    """Torch's own layer by another name."""


def test_a_subclass_by_another_name_is_replaced():
    assert type(qclip.fix(Named(8))) is nn.GroupNorm


LEFT = {
    "own forward": (lambda: Activated(8), "forward pass of its own: replace it by hand"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.BatchNorm2d(8), dim=None), "remove_parametrizations"),
    "weight norm": (lambda: weight_norm(nn.BatchNorm2d(8), dim=None), "remove_weight_norm"),
    "max norm": (lambda: nn.Embedding(8, 2, max_norm=1.0), "max_norm=None"),
    "scripted": (lambda: torch.jit.script(nn.BatchNorm2d(8)), "before torch.jit"),
    "hooks without a shape": (lambda: _hooked(nn.LazyBatchNorm2d()), "run one batch through the model first"),
}


def _hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize(("make", "remedy"), LEFT.values(), ids=list(LEFT))
def test_what_it_cannot_replace_is_left_and_named(make, remedy):
    model = nn.ModuleDict({"layer": make(), "other": nn.BatchNorm2d(8)})
    layer = model["layer"]
    (left,) = qclip.fixes(model).left
    assert left.path == "layer"
    assert remedy in left.remark
    qclip.fix(model)
    assert model["layer"] is layer
    assert type(model["other"]) is nn.GroupNorm


def test_a_compiled_model_is_fixed_inside():
    model = torch.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), backend="eager")
    assert qclip.fix(model) is model
    assert type(model.get_submodule("1")) is nn.GroupNorm
    assert model(torch.randn(2, 3, 5, 5)).shape == (2, 8, 3, 3)


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=2
    )
    model, x = transformers.ResNetForImageClassification(config).train(), torch.randn(B, 3, 16, 16)

    def losses(outputs, targets):
        return squared(outputs.logits, targets)

    with pytest.raises(qclip.Refusal, match=r"qclip\.fix\(model\)"):
        qclip.clipped_gradients(model, losses, x, torch.randn(B, 2), 1.0)
    qclip.fix(model)
    assert not [layer for layer in model.modules() if "BatchNorm" in type(layer).__name__]
    assert qclip.clipped_gradients(model, losses, x, torch.randn(B, 2), 1.0).norms.min() > 0

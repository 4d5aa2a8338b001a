"""Compiled steps, replayed as CUDA graphs: the eager driver's results, in memory that stays, without waiting.

A rehearsal runs the traced graphs as they are. Each model is compiled once for all its tests.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.cases import Net
from engine.compare import distance
from engine.driven import Pair, as_traced
from gpu.device import DEVICE, ON_GPU, cuda_only
from qclip.engine.capture import overrides
from qclip.engine.compiled import driver
from qclip.engine.compiled.backend import Replay
from qclip.engine.compiled.driver import Step

pytestmark = pytest.mark.gpu

SLOTS = 12
CLASSES = 5003 if ON_GPU else 19
"""Enough for the kernel of cross entropy."""
LENGTH = 16


def weighted(outputs, targets):
    """Cross entropy times a weight of each example, by which it can be made not finite."""
    scores = getattr(outputs, "logits", outputs)
    labels, weights = targets
    losses = F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return losses.view(len(labels), -1).mean(1) * weights


def random(*shape, dtype=torch.float32, high=None):
    generator = torch.Generator().manual_seed(len(shape) + (shape[0] if shape else 0))
    if high is not None:
        return torch.randint(high, shape, generator=generator).to(DEVICE)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


class Mlp:
    rtol = 1e-3

    def model(self):
        return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 10))

    def batch(self, count):
        return random(count, 20), (random(count, high=10), torch.ones(count, device=DEVICE))


class HalfMlp(Mlp):
    """With several positions: Gram products and clipped sums of native 16-bit numbers."""

    rtol = 0.05

    def model(self):
        return super().model().to(torch.bfloat16)

    def batch(self, count):
        return random(count, LENGTH, 20, dtype=torch.bfloat16), (
            random(count, LENGTH, high=10),
            torch.ones(count, device=DEVICE),
        )


class Cnn:
    """In 16 bits, channels last: the kernels for windows."""

    rtol = 0.05

    def model(self):
        layers = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)
        model = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        return model.to(torch.bfloat16, memory_format=torch.channels_last)

    def batch(self, count):
        images = random(count, 3, 16, 16, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        return images, (random(count, high=10), torch.ones(count, device=DEVICE))


class Gpt2:
    """In 16 bits, with a vocabulary for the kernel of cross entropy; layer norms have theirs."""

    rtol = 0.05

    def model(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            vocab_size=CLASSES, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, use_cache=False,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).train().to(torch.bfloat16)

    def batch(self, count):
        words = random(count, LENGTH, high=CLASSES)
        return {"input_ids": words}, (words.roll(-1, 1), torch.ones(count, device=DEVICE))


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """The traced graph runs as it is where there is no GPU; that it can be compiled is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)
        yield


class Driven:
    """One kind of model with its compiled driver, beside an eager engine."""

    def __init__(self, kind, model=None, **options):
        torch.manual_seed(0)
        self.kind = kind
        self.pair = Pair((model or kind.model()).to(DEVICE), weighted, slots=SLOTS, **options)

    def clip_norm(self, batch):
        """Such that half of the examples are clipped."""
        return float(self.pair.expected(*batch).norms.median())

    @property
    def steps(self):
        return list(self.pair.driver._steps.values())

    def assert_agree(self, batch, mask=None):
        clip_norm = self.clip_norm(batch)
        found = self.pair.compiled(*batch, clip_norm, mask=mask)
        expected = self.pair.expected(*batch, clip_norm, mask=mask)
        assert all(isinstance(step, Step) for step in self.steps), self.steps
        torch.testing.assert_close(found.norms, expected.norms, rtol=self.kind.rtol, atol=1e-6)
        torch.testing.assert_close(found.losses, expected.losses, rtol=self.kind.rtol, atol=1e-6, equal_nan=True)
        counted = expected.norms[expected.norms.isfinite()].clamp(max=clip_norm)
        assert distance(found, expected) <= self.kind.rtol * float(counted.sum())
        assert torch.equal(found.mask, expected.mask)
        return found

    def use(self, batch, times):
        """So often, and past the next proof."""
        (step,) = self.steps
        while step.uses < times:
            self.pair.compiled(*batch)


@pytest.fixture(scope="module", params=[Mlp, HalfMlp, Cnn, Gpt2], ids=lambda kind: kind.__name__)
def driven(request):
    return Driven(request.param())


def test_one_step_serves_every_number_of_examples(driven):
    """Full, padded, one example, masked; CUDA only: by a recorded graph."""
    for count in (SLOTS, 7, 1):
        driven.assert_agree(driven.kind.batch(count))
    mask = torch.arange(SLOTS, device=DEVICE) % 3 != 1
    found = driven.assert_agree(driven.kind.batch(SLOTS), mask)
    assert not found.norms[~mask].any()
    (step,) = driven.steps
    assert isinstance(step.run, Replay) == ON_GPU


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_example_that_is_not_finite(driven, value):
    """Everyone else counts as if it were not there, in a full batch and in a padded one."""
    for count in (SLOTS, 5):
        inputs, (labels, weights) = driven.kind.batch(count)
        weights[3] = value
        clip_norm = driven.clip_norm((inputs, (labels, torch.ones_like(weights))))
        found = driven.pair.compiled(inputs, (labels, weights), clip_norm)
        found_sums = {name: x.clone() for name, x in found.sums.items()}
        keep = torch.arange(count, device=DEVICE) != 3
        other = driven.pair.compiled(inputs, (labels, torch.ones_like(weights)), clip_norm, mask=keep)
        assert found.norms[3] == torch.inf
        for name, x in found_sums.items():
            assert x.isfinite().all()
            torch.testing.assert_close(x, other.sums[name], rtol=1e-3, atol=1e-4 * clip_norm)


def test_no_example_counts_for_more_than_the_bound(driven):
    batch = driven.kind.batch(SLOTS)
    clip_norm = 0.5 * driven.clip_norm(batch)
    full = driven.pair.compiled(*batch, clip_norm)
    sums = {name: x.double() for name, x in full.sums.items()}
    for gone in range(SLOTS):
        keep = torch.arange(SLOTS, device=DEVICE) != gone
        less = driven.pair.compiled(*batch, clip_norm, mask=keep)
        moved = torch.stack([(sums[name] - less.sums[name].double()).square().sum() for name in sums]).sum().sqrt()
        assert float(moved) <= clip_norm * (1 + 1e-5)


def test_parameters_are_read_anew(driven):
    """Changed in place, as by an optimizer, and moved to another place, where the graph is recorded again."""
    batch = driven.kind.batch(SLOTS)
    with torch.no_grad():
        for p in driven.pair.model.parameters():
            p.mul_(1.1)
    driven.assert_agree(batch)
    for p in driven.pair.model.parameters():
        p.data = p.data.clone()
    driven.assert_agree(batch)


@cuda_only("memory of a GPU, and its recordings")
def test_a_replay_uses_the_same_memory(driven):
    batch = driven.kind.batch(SLOTS)
    driven.pair.compiled(*batch)
    driven.use(batch, 17)
    places, held = set(), set()
    for _ in range(5):
        found = driven.pair.compiled(*batch)
        assert found.is_view
        places.add(tuple(x.data_ptr() for x in found.sums.values()))
        del found
        torch.cuda.synchronize()
        held.add(torch.cuda.memory_allocated())
    assert len(places) == 1
    assert len(held) == 1


@cuda_only("torch's detector of waiting")
def test_nothing_waits_for_the_gpu(driven):
    """Neither with a full batch, nor a padded one, nor a masked one, until somebody looks at the result."""
    batches = [driven.kind.batch(SLOTS), driven.kind.batch(7)]
    for batch in batches:
        driven.pair.compiled(*batch)
    driven.use(batches[0], 17)  # past the proofs at the 1st, 2nd and 16th
    mask = torch.arange(SLOTS, device=DEVICE) % 2 == 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [driven.pair.compiled(*batch, wait=False) for batch in batches]
        results.append(driven.pair.compiled(*batches[0], mask=mask, wait=False))
        with pytest.raises(RuntimeError, match="synchronizing"):
            results[0].norms.sum().item()  # the detector works
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.resolve().norms.isfinite().all() for result in results)


def test_two_kinds_of_batches():
    """Each has its step; they take turns."""
    driven = Driven(Mlp())
    flat, long = (
        Mlp().batch(SLOTS),
        (random(SLOTS, 3, 20), (random(SLOTS, 3, high=10), torch.ones(SLOTS, device=DEVICE))),
    )
    for _ in range(3):
        driven.assert_agree(flat)
        driven.assert_agree(long)
    assert len(driven.steps) == 2


def test_groups_per_layer():
    driven = Driven(Mlp(), groups="per-layer")
    batch = Mlp().batch(SLOTS)
    found = driven.assert_agree(batch)
    assert found.group_norms.shape == (SLOTS, 2)
    driven.assert_agree(Mlp().batch(5))


def test_random_numbers_of_a_replay():
    """New ones at every step, from the device's generator: the same seed repeats them."""
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 10))
    driven = Driven(Mlp(), model)
    batch = Mlp().batch(SLOTS)
    for _ in range(17):
        driven.pair.compiled(*batch)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append([driven.pair.compiled(*batch).norms.clone() for _ in range(3)])
    for one, other in zip(runs[0], runs[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
    assert not torch.allclose(runs[0][0], runs[0][1])
    assert not torch.allclose(runs[0][0], runs[2][0])
    (step,) = driven.steps
    assert step.draws


SPELLINGS = {
    "transposed": lambda scores, labels: F.cross_entropy(scores.float().transpose(1, 2), labels, reduction="none"),
    "not-converted": lambda scores, labels: F.cross_entropy(scores.mT, labels, reduction="none"),
    "smoothed": lambda scores, labels: F.cross_entropy(
        scores.float().view(-1, CLASSES), labels.flatten(), reduction="none", label_smoothing=0.1
    ).view(labels.shape),
    "in-two-steps": lambda scores, labels: F.nll_loss(
        scores.float().log_softmax(-1).flatten(0, 1), labels.flatten(), reduction="none"
    ).view(labels.shape),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_cross_entropy_over_many_classes(name, autocast, monkeypatch):
    """However it is written, by the kernels, from scores in 16 bits of a widened layer."""
    graphs = []
    compile_graph = driver.compile_graph

    def kept(graph, *rest):
        graphs.append(graph)
        return compile_graph(graph, *rest)

    monkeypatch.setattr(driver, "compile_graph", kept)
    if not ON_GPU:
        monkeypatch.setattr(overrides, "has_many_classes", lambda scores: True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, CLASSES)).to(DEVICE)
    model = model if autocast else model.to(torch.bfloat16)
    x = random(SLOTS, LENGTH, 20, dtype=torch.float32 if autocast else torch.bfloat16)
    y = random(SLOTS, LENGTH, high=CLASSES)
    y[1, 3:] = -100
    pair = Pair(model, lambda scores, labels: SPELLINGS[name](scores, labels).float().mean(1))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        found, expected = pair.compiled(x, y, 0.5), pair.expected(x, y, 0.5)
    operations = {str(node.target) for node in graphs[0].graph.nodes}
    assert "qclip.cross_entropy.default" in operations
    assert not any("log_softmax" in operation for operation in operations)
    torch.testing.assert_close(found.norms, expected.norms, rtol=0.05, atol=1e-6)
    torch.testing.assert_close(found.losses, expected.losses, rtol=0.05, atol=1e-6)
    assert distance(found, expected) <= 0.05 * float(expected.norms.clamp(max=0.5).sum())


def test_a_checkpointed_head_of_many_classes(monkeypatch):
    """A GPU's backward pass runs in a thread of its own; the head is computed there as it was before."""
    if not ON_GPU:
        monkeypatch.setattr(overrides, "has_many_classes", lambda scores: True)
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(20, 64), nn.GELU()), nn.Linear(64, CLASSES)
    model = Net(lambda n, x, y: checkpoint(losses, n, x, y, use_reentrant=False), body=body, head=head)

    def losses(n, x, y):
        scores = n.head(n.body(x)).float()
        return F.cross_entropy(scores.mT, y, reduction="none").mean(1)

    x, y = random(SLOTS, LENGTH, 20, dtype=torch.bfloat16), random(SLOTS, LENGTH, high=CLASSES)
    pair = Pair(model.to(DEVICE, torch.bfloat16), lambda outputs, targets: outputs)
    found, expected = pair.compiled((x, y), y, 0.5), pair.expected((x, y), y, 0.5)
    assert all(isinstance(step, Step) for step in pair.driver._steps.values())
    torch.testing.assert_close(found.norms, expected.norms, rtol=0.05, atol=1e-6)
    assert distance(found, expected) <= 0.05 * float(expected.norms.clamp(max=0.5).sum())

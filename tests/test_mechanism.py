"""Noise of the size that the value asks for: measured, per group, independent, from its own stream."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from qclip import mechanism
from qclip.mechanism import BoundedSum, noise_stds, release
from qclip.theory import group_noise

N = 200_000


def zeros(*, bounds=(2.0,), sizes=(N,), dtype=torch.float32):
    tensors = {f"{k}": torch.zeros(size, dtype=dtype) for k, size in enumerate(sizes)}
    return BoundedSum(tensors, {name: int(name) for name in tensors}, bounds, sizes)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_standard_deviation_is_the_multiplier_times_the_bound(seed):
    # The sample's deviation has relative error 1/sqrt(2N) = 0.0016: five of them fail one seed in 2e6.
    noise = release(zeros(bounds=(2.0,)), 1.5, generator(seed))["0"]
    assert noise.std().item() == pytest.approx(3.0, rel=5 / math.sqrt(2 * N))
    assert abs(noise.mean().item()) < 5 * 3.0 / math.sqrt(N)


def test_it_is_gaussian():
    noise = release(zeros(bounds=(1.0,)), 1.0, generator(4))["0"].numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-4  # fails one seed in 1e4


def test_coordinates_and_releases_are_independent():
    stream = generator(5)
    first, second = (release(zeros(), 1.0, stream)["0"].numpy() for _ in range(2))
    for a, b in [(first, second), (first[1:], first[:-1]), (first[: N // 2], first[N // 2 :])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))  # each fails one seed in 2e6


def test_groups_share_the_noise_so_that_its_power_is_least():
    bounds, sizes, z = (1.0, 5.0, 0.2), (40, N, 3 * N), 1.3
    value = zeros(bounds=bounds, sizes=sizes)
    stds = noise_stds(value, z)
    assert sum(b**2 / s**2 for b, s in zip(bounds, stds, strict=True)) == pytest.approx(1 / z**2)
    power = sum(d * s**2 for d, s in zip(sizes, stds, strict=True))
    assert power < min(group_noise(bounds, sizes, z, how).power for how in ("equal", "proportional"))
    noisy = release(value, z, generator(6))
    for k in (1, 2):
        assert noisy[f"{k}"].std().item() == pytest.approx(stds[k], rel=5 / math.sqrt(2 * sizes[k]))


def test_who_holds_part_of_the_coordinates_adds_the_noise_of_all():
    """The groups' shares of the noise follow from the run's dimensions, so that holders of shards agree on them."""
    whole = zeros(bounds=(1.0, 5.0), sizes=(N, 40))
    shard = replace(whole, tensors={"0": torch.zeros(N // 4), "1": whole.tensors["1"]})
    assert noise_stds(shard, 1.3) == noise_stds(whole, 1.3)
    noise = release(shard, 1.3, generator(7))["0"]
    assert noise.std().item() == pytest.approx(noise_stds(whole, 1.3)[0], rel=5 / math.sqrt(2 * N / 4))


def test_tensors_of_one_group_get_one_deviation():
    tensors = {"weight": torch.zeros(300, 300), "bias": torch.zeros(N)}
    noisy = release(BoundedSum(tensors, {"weight": 0, "bias": 0}, (1.0,), (90_000 + N,)), 2.0, generator())
    for noise in noisy.values():
        assert noise.std().item() == pytest.approx(2.0, rel=5 / math.sqrt(2 * noise.numel()))


def test_the_noise_is_added_to_the_sum_in_its_precision():
    for dtype in (torch.float32, torch.float64):
        base = zeros(sizes=(100,), dtype=dtype)
        moved = replace(base, tensors={"0": base.tensors["0"] + 7})
        quiet, noisy = release(base, 1.0, generator())["0"], release(moved, 1.0, generator())["0"]
        assert noisy.dtype == dtype
        torch.testing.assert_close(noisy - quiet, torch.full((100,), 7.0, dtype=dtype), rtol=0, atol=1e-5)
        assert torch.equal(base.tensors["0"], torch.zeros(100, dtype=dtype))


def test_no_noise_leaves_the_sum_and_the_stream_alone():
    value, stream = zeros(sizes=(5,)), generator()
    before = stream.get_state()
    assert torch.equal(release(value, 0, stream)["0"], value.tensors["0"])
    assert torch.equal(stream.get_state(), before)


def test_it_never_touches_the_global_stream():
    before = torch.get_rng_state()
    release(zeros(sizes=(5,)), 1.0, generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_whole_bound_is_the_norm_of_the_groups():
    assert zeros(bounds=(3.0, 4.0), sizes=(1, 1)).l2_bound == 5.0


def test_the_release_is_divided_noise_and_all():
    """By the same stream as without: the same noise, over the divisor."""
    value = BoundedSum({"0": torch.linspace(-5, 5, N)}, {"0": 0}, (2.0,), (N,))
    whole, divided = (release(value, 1.5, generator(3), divisor=divisor)["0"] for divisor in (1.0, 8.0))
    torch.testing.assert_close(divided, whole / 8, rtol=1e-5, atol=1e-6)
    noise = divided - value.tensors["0"] / 8
    # Five standard errors each: one seed in 2e6 fails.
    assert noise.std().item() == pytest.approx(3.0 / 8, rel=5 / math.sqrt(2 * N))
    assert abs(noise.mean().item()) < 5 * 3.0 / 8 / math.sqrt(N)


def test_the_noise_is_added_before_it_is_rounded():
    """To the precision of the parameter: the bits are those of the noisy sum."""
    value = BoundedSum({"a": torch.linspace(-5, 5, 1000)}, {"a": 0}, (2.0,), (1000,))
    like = {"a": torch.zeros(1000, dtype=torch.bfloat16)}
    rounded = release(value, 1.5, generator(3), divisor=4.0, like=like)["a"]
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, release(value, 1.5, generator(3), divisor=4.0)["a"].bfloat16())
    assert torch.equal(value.tensors["a"], torch.linspace(-5, 5, 1000))


def test_each_tensor_has_the_precision_it_is_like():
    value = zeros(bounds=(1.0, 1.0, 1.0), sizes=(5, 6, 7))
    noisy = release(value, 1.0, generator(), like={"1": torch.zeros(6, dtype=torch.bfloat16)})
    assert [x.dtype for x in noisy.values()] == [torch.float32, torch.bfloat16, torch.float32]
    assert all(x.any() for x in noisy.values())


def test_without_noise_the_sum_is_divided_and_rounded():
    value = BoundedSum({"a": torch.linspace(-5, 5, 100)}, {"a": 0}, (2.0,), (100,))
    like = {"a": torch.zeros(100, dtype=torch.bfloat16)}
    noisy = release(value, 0, generator(), divisor=3.0, like=like)["a"]
    assert torch.equal(noisy, (value.tensors["a"] / 3).bfloat16())


def test_a_change_to_one_released_tensor_is_not_a_change_to_another():
    """They lie in one piece of memory, and optimizers and autograd look at versions."""
    noisy = release(zeros(bounds=(1.0, 2.0), sizes=(5, 7)), 1.0, generator())
    before, value = noisy["1"]._version, noisy["1"].clone()
    noisy["0"].fill_(3.0)
    assert noisy["1"]._version == before
    assert torch.equal(noisy["1"], value)


def test_shapes_and_names_stay_in_their_order():
    tensors = {"z": torch.zeros(2, 3), "a": torch.zeros((), dtype=torch.float64), "m": torch.zeros(4, 1, 2)}
    noisy = release(BoundedSum(tensors, dict.fromkeys(tensors, 0), (1.0,), (15,)), 1.0, generator())
    assert [(name, x.shape, x.dtype) for name, x in noisy.items()] == [
        (name, x.shape, x.dtype) for name, x in tensors.items()
    ]
    assert all(x.all() for x in noisy.values())


def test_many_numbers_are_drawn_in_parts(monkeypatch):
    """Every part has noise of its own."""
    monkeypatch.setattr(mechanism, "BUCKET", 1000)
    noisy = release(zeros(bounds=(1.0,) * 4, sizes=(700,) * 4), 1.0, generator())
    for a in range(4):
        for b in range(a):
            assert not torch.equal(noisy[f"{a}"], noisy[f"{b}"])
            # Six pairs, each outside five standard errors in one seed of 2e6.
            assert abs(np.corrcoef(noisy[f"{a}"], noisy[f"{b}"])[0, 1]) < 5 / math.sqrt(700)

"""Noise of the size that the value asks for: measured, per group, independent, from its source, on a public grid."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from noise_traces import SETTINGS, TAU, assert_equally_often, assert_on_grid, finer_than_the_sum
from qclip.theory import group_noise
from qclip.training import noise as mechanism
from qclip.training.noise import NoiseSource, grid_spacing, noise_stds, release
from qclip.training.sums import BoundedSum, Place

N = 200_000


def zeros(*, bounds=(2.0,), sizes=(N,), dtype=torch.float32):
    tensors = {f"{k}": torch.zeros(size, dtype=dtype) for k, size in enumerate(sizes)}
    return BoundedSum(tensors, {name: int(name) for name in tensors}, bounds, sizes)


@pytest.mark.parametrize("seed", range(3))
def test_the_standard_deviation_is_the_multiplier_times_the_bound(seed):
    # The sample's deviation has relative error 1/sqrt(2N) = 0.0016: five of them fail one seed in 2e6.
    noise = release(zeros(bounds=(2.0,)), 1.5, NoiseSource(seed)).tensors["0"]
    assert noise.std().item() == pytest.approx(3.0, rel=5 / math.sqrt(2 * N))
    assert abs(noise.mean().item()) < 5 * 3.0 / math.sqrt(N)


def test_it_is_gaussian():
    noise = release(zeros(bounds=(1.0,)), 1.0, NoiseSource(4)).tensors["0"].numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-4  # fails one seed in 1e4


def test_coordinates_and_releases_are_independent():
    source = NoiseSource(5)
    first, second = (release(zeros(), 1.0, source).tensors["0"].numpy() for _ in range(2))
    for a, b in [(first, second), (first[1:], first[:-1]), (first[: N // 2], first[N // 2 :])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(len(a))  # each fails one seed in 2e6


def test_groups_share_the_noise_so_that_its_power_is_least():
    bounds, sizes, z = (1.0, 5.0, 0.2), (40, N, 3 * N), 1.3
    value = zeros(bounds=bounds, sizes=sizes)
    stds = noise_stds(value, z)
    assert sum(b**2 / s**2 for b, s in zip(bounds, stds, strict=True)) == pytest.approx(1 / z**2)
    power = sum(d * s**2 for d, s in zip(sizes, stds, strict=True))
    assert power < min(group_noise(bounds, sizes, z, how).power for how in ("equal", "proportional"))
    noisy = release(value, z, NoiseSource(6)).tensors
    for k in (1, 2):
        assert noisy[f"{k}"].std().item() == pytest.approx(stds[k], rel=5 / math.sqrt(2 * sizes[k]))


def test_who_holds_part_of_the_coordinates_adds_the_noise_of_all():
    """The groups' shares of the noise follow from the run's dimensions, so that holders of shards agree on them."""
    whole = zeros(bounds=(1.0, 5.0), sizes=(N, 40))
    shard = replace(whole, tensors={"0": torch.zeros(N // 4), "1": whole.tensors["1"]})
    assert noise_stds(shard, 1.3) == noise_stds(whole, 1.3)
    noise = release(shard, 1.3, NoiseSource(7)).tensors["0"]
    assert noise.std().item() == pytest.approx(noise_stds(whole, 1.3)[0], rel=5 / math.sqrt(2 * N / 4))


def test_tensors_of_one_group_get_one_deviation():
    tensors = {"weight": torch.zeros(300, 300), "bias": torch.zeros(N)}
    noisy = release(BoundedSum(tensors, {"weight": 0, "bias": 0}, (1.0,), (90_000 + N,)), 2.0, NoiseSource(0)).tensors
    for noise in noisy.values():
        assert noise.std().item() == pytest.approx(2.0, rel=5 / math.sqrt(2 * noise.numel()))


def test_the_noise_is_added_to_the_sum():
    """In the precision of the sum; 7 is a multiple of the grid's spacing."""
    for dtype in (torch.float32, torch.float64):
        base = zeros(sizes=(100,), dtype=dtype)
        moved = replace(base, tensors={"0": base.tensors["0"] + 7})
        quiet, noisy = (release(each, 1.0, NoiseSource(0)).tensors["0"] for each in (base, moved))
        assert noisy.dtype == dtype
        torch.testing.assert_close(noisy - quiet, torch.full((100,), 7.0, dtype=dtype), rtol=0, atol=1e-5)
        assert torch.equal(base.tensors["0"], torch.zeros(100, dtype=dtype))


def test_no_noise_leaves_the_sum_and_the_source_alone():
    value, source = zeros(sizes=(5,)), NoiseSource(0)
    before = source.state_dict()
    assert torch.equal(release(value, 0, source).tensors["0"], value.tensors["0"])
    assert source.state_dict() == before


def test_it_never_touches_the_global_streams():
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    release(zeros(sizes=(5,)), 1.0, NoiseSource(0))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)  # noqa: NPY002


def test_the_whole_bound_is_the_norm_of_the_groups():
    assert zeros(bounds=(3.0, 4.0), sizes=(1, 1)).l2_bound == 5.0


def test_the_release_is_divided_noise_and_all():
    """By the same source as without: the same noise, over the divisor."""
    value = BoundedSum({"0": torch.linspace(-5, 5, N)}, {"0": 0}, (2.0,), (N,))
    whole, divided = (release(value, 1.5, NoiseSource(3), divisor=divisor).tensors["0"] for divisor in (1.0, 8.0))
    torch.testing.assert_close(divided, whole / 8, rtol=1e-5, atol=1e-6)
    noise = divided - value.tensors["0"] / 8
    # Five standard errors each: one seed in 2e6 fails.
    assert noise.std().item() == pytest.approx(3.0 / 8, rel=5 / math.sqrt(2 * N))
    assert abs(noise.mean().item()) < 5 * 3.0 / 8 / math.sqrt(N)


def test_the_noise_is_added_before_it_is_rounded():
    """To the precision of the parameter: the bits are those of the noisy sum."""
    value = BoundedSum({"a": torch.linspace(-5, 5, 1000)}, {"a": 0}, (2.0,), (1000,))
    dtypes = {"a": torch.bfloat16}
    rounded = release(value, 1.5, NoiseSource(3), divisor=4.0, dtypes=dtypes).tensors["a"]
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, release(value, 1.5, NoiseSource(3), divisor=4.0).tensors["a"].bfloat16())
    assert torch.equal(value.tensors["a"], torch.linspace(-5, 5, 1000))


def test_each_tensor_has_the_precision_asked_for():
    value = zeros(bounds=(1.0, 1.0, 1.0), sizes=(5, 6, 7))
    noisy = release(value, 1.0, NoiseSource(0), dtypes={"1": torch.bfloat16}).tensors
    assert [x.dtype for x in noisy.values()] == [torch.float32, torch.bfloat16, torch.float32]
    assert all(x.any() for x in noisy.values())


def test_without_noise_the_sum_is_divided_and_rounded():
    value = BoundedSum({"a": torch.linspace(-5, 5, 100)}, {"a": 0}, (2.0,), (100,))
    dtypes = {"a": torch.bfloat16}
    noisy = release(value, 0, NoiseSource(0), divisor=3.0, dtypes=dtypes).tensors["a"]
    assert torch.equal(noisy, (value.tensors["a"] / 3).bfloat16())


def test_a_change_to_one_released_tensor_is_not_a_change_to_another():
    """Optimizers and autograd look at versions."""
    noisy = release(zeros(bounds=(1.0, 2.0), sizes=(5, 7)), 1.0, NoiseSource(0)).tensors
    before, value = noisy["1"]._version, noisy["1"].clone()
    noisy["0"].fill_(3.0)
    assert noisy["1"]._version == before
    assert torch.equal(noisy["1"], value)


def test_shapes_and_names_stay_in_their_order():
    tensors = {"z": torch.zeros(2, 3), "a": torch.zeros((), dtype=torch.float64), "m": torch.zeros(4, 1, 2)}
    noisy = release(BoundedSum(tensors, dict.fromkeys(tensors, 0), (1.0,), (15,)), 1.0, NoiseSource(0)).tensors
    assert [(name, x.shape, x.dtype) for name, x in noisy.items()] == [
        (name, x.shape, x.dtype) for name, x in tensors.items()
    ]
    assert all(x.all() for x in noisy.values())


def test_chunks_have_noise_of_their_own(monkeypatch):
    """Wherever tensors begin and end in them."""
    monkeypatch.setattr(mechanism, "CHUNK", 1000)
    noisy = release(zeros(bounds=(1.0,) * 4, sizes=(700,) * 4), 1.0, NoiseSource(0)).tensors
    for a in range(4):
        for b in range(a):
            assert not np.isin(noisy[f"{a}"], noisy[f"{b}"]).all()
            # Six pairs, each outside five standard errors in one seed of 2e6.
            assert abs(np.corrcoef(noisy[f"{a}"], noisy[f"{b}"])[0, 1]) < 5 / math.sqrt(700)
    whole = release(zeros(bounds=(2.0,), sizes=(2800,)), 1.0, NoiseSource(0)).tensors["0"]
    chunks = [whole[start : start + 1000] for start in range(0, 2800, 1000)]
    assert all(len(np.unique(chunk)) > 0.9 * len(chunk) for chunk in chunks)
    assert abs(np.corrcoef(chunks[0], chunks[1])[0, 1]) < 5 / math.sqrt(1000)


@pytest.mark.parametrize("sizes", [(300_001,), (5, 70_000, 1, 200_000, 65_536)], ids=["one", "many"])
def test_the_number_of_threads_does_not_matter(sizes):
    value = zeros(bounds=(1.0,) * len(sizes), sizes=sizes)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(release(value, 1.0, NoiseSource(8)).tensors)
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(other[name], noise) for name, noise in found[0].items())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_get_the_noise_of_the_whole(monkeypatch, size):
    """For ranks that hold a part of each tensor, cut as torch.chunk cuts; the last tensor is whole on all of them."""
    monkeypatch.setattr(mechanism, "CHUNK", 100)
    lengths = (230, 3, 100, 7, 470, 2)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{k}": torch.randn(length, generator=generator) for k, length in enumerate(lengths)}
    members, bounds = {name: int(name) % 2 for name in tensors}, (1.0, 3.0)
    dims = tuple(sum(length for k, length in enumerate(lengths) if k % 2 == group) for group in (0, 1))
    value = BoundedSum(tensors, members, bounds, dims)
    expected = release(value, 1.3, NoiseSource(3), divisor=7).tensors
    found = {name: [] for name in tensors}
    for rank in range(size):
        places, parts = {}, {"5": tensors["5"]}
        for k, length in enumerate(lengths[:-1]):
            rows = -(-length // size)
            start = min(rank * rows, length)
            places[f"{k}"] = Place(start, length)
            parts[f"{k}"] = tensors[f"{k}"][start : start + rows].clone()
        own = replace(value, tensors={name: parts[name] for name in tensors})
        released = release(own, 1.3, NoiseSource(3), divisor=7, places=places).tensors
        assert torch.equal(released["5"], expected["5"])
        for name, part in released.items():
            found[name].append(part)
    for name in places:
        assert torch.equal(torch.cat(found[name]), expected[name])


def test_sums_may_lie_in_any_order():
    turned = torch.arange(12.0).view(3, 4).T
    (noisy,) = release(BoundedSum({"a": turned}, {"a": 0}, (1.0,), (12,)), 1.0, NoiseSource(0)).tensors.values()
    (plain,) = release(
        BoundedSum({"a": turned.contiguous()}, {"a": 0}, (1.0,), (12,)), 1.0, NoiseSource(0)
    ).tensors.values()
    assert torch.equal(noisy, plain)


def one_coordinate(raw, z, divisor, *, dtype=torch.float32, seed=0):
    """The release of one coordinate, N times."""
    value = BoundedSum({"a": torch.full((N,), raw, dtype=dtype)}, {"a": 0}, (TAU,), (1,))
    return release(value, z, NoiseSource(seed), divisor=divisor).tensors["a"]


@pytest.mark.parametrize(("z", "divisor"), SETTINGS)
def test_the_last_bits_do_not_tell_whether_someone_was_there(z, divisor):
    """Noise added in float32 fails: 17 % and 4 % without the example (z = 1 and 4), and never with it."""
    without, present = (
        finer_than_the_sum(one_coordinate(raw, z, divisor, seed=seed), divisor) for seed, raw in enumerate((0.0, TAU))
    )
    assert_equally_often(without, present)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("z", "divisor"), SETTINGS)
def test_released_values_lie_on_a_grid_that_the_sum_does_not_move(z, divisor, dtype):
    spacing = grid_spacing(z * TAU / divisor)
    for seed, raw in enumerate((0.0, TAU, TAU / 3, -1e-9)):
        assert_on_grid(one_coordinate(raw, z, divisor, dtype=dtype, seed=seed), spacing)


def test_the_grid_is_that_of_the_group():
    """Counts, gradients and whatever rides with them: each group's noise says how fine it is."""
    value = zeros(bounds=(1.0, 300.0), sizes=(N, 40))
    moved = replace(value, tensors={name: x + 1 / 3 for name, x in value.tensors.items()})
    noisy = release(moved, 1.3, NoiseSource(9), divisor=7.0).tensors
    spacings = [grid_spacing(std / 7.0) for std in noise_stds(value, 1.3)]
    assert spacings[0] < spacings[1]
    assert_on_grid(noisy["0"], spacings[0])
    multiples = noisy["1"].double() / spacings[1]
    assert torch.equal(multiples, multiples.round())


@pytest.mark.parametrize("std", [1.0, 1.5, 1.9999999, 2.0, 1e-9, 3e5])
def test_the_spacing_is_a_power_of_two_far_below_the_noise(std):
    spacing = grid_spacing(std)
    assert math.frexp(spacing)[0] == 0.5
    assert std * 2.0**-17 < spacing <= std * 2.0**-16


def test_rounding_to_the_grid_adds_no_noise_and_no_shift():
    """Against a grid that is 2^30 times finer: at most half a spacing apart, and as much up as down."""
    source, n = NoiseSource(11), 100_000
    raw = [torch.full((n,), 1 / 3, dtype=torch.float64)]
    state = source.state_dict()
    (coarse,) = mechanism.noisy_sums(raw, [1.0], [2.0**-16], 1.0, source.streams(), torch.float64)
    source.load_state_dict(state)
    (fine,) = mechanism.noisy_sums(raw, [1.0], [2.0**-46], 1.0, source.streams(), torch.float64)
    apart = ((coarse - fine) * 2.0**16).numpy()
    assert np.abs(apart).max() <= 0.5
    assert stats.kstest(apart, stats.uniform(-0.5, 1).cdf).pvalue > 1e-4  # fails one seed in 1e4


def test_no_grid_without_noise():
    value = BoundedSum({"a": torch.full((3,), 1 / 3)}, {"a": 0}, (TAU,), (3,))
    assert torch.equal(release(value, 0, NoiseSource(0)).tensors["a"], value.tensors["a"])


def test_a_sum_that_nobody_has_looked_at_is_resolved_first():
    """Where an example was not finite, the sum without it is released, and nothing of the other."""
    clean = BoundedSum({"a": torch.full((3,), 2.0)}, {"a": 0}, (1.0,), (3,))
    spoilt = replace(
        clean, tensors={"a": torch.full((3,), torch.nan)}, all_finite=torch.tensor(False), recompute=lambda: clean
    )
    assert release(spoilt, 0, NoiseSource(0)).tensors["a"].tolist() == [2.0] * 3
    assert release(spoilt, 1.0, NoiseSource(0)).tensors["a"].isfinite().all()

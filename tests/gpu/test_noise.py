"""The law of the noise, as drawn on a GPU: by the kernel itself, and as `noise.release` uses it.

Seeds are fixed, and each line says how often another seed would fail it. A rehearsal runs the kernel in Triton's
interpreter on fewer numbers, and release by the kernel's twin.
"""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
from scipy import stats

from engine.test_kernels import interpreting
from engine.test_noise_kernel import launched, twin
from gpu.device import DEVICE, ON_GPU, cuda_only, moved, require_memory
from noise_traces import SETTINGS, TAU, assert_equally_often, assert_on_grid, finer_than_the_sum
from qclip.engine.kernels import noise as noise_kernel
from qclip.training import noise
from qclip.training.noise import NoiseSource, grid_spacing

pytestmark = pytest.mark.gpu

N = 4_000_001 if ON_GPU else 40_001
"""Not a whole number of blocks."""
SEEDS = (2**128 - 123456789012345, 7)
"""The 128 secret bits of a launch."""
FIVE_SIGMA = 5.0
"""A normal number is further out once in 1.7 million times."""


def on_gpu(raws, *arguments, **options):
    with DEVICE:
        return launched(moved(raws), *arguments, True, torch.version.hip is None, **options)


def rehearsed(raws, stds, scale, seed, dtype, spacings=None):
    """What `interpreting` calls, which passes no names on."""
    return launched(raws, stds, scale, seed, dtype, True, False, spacings)


@pytest.fixture(scope="module")
def kernel():
    """The kernel as it is launched on this GPU, fast logarithm and all; in a rehearsal, the interpreter's."""
    if ON_GPU:
        pytest.importorskip("triton")
        yield on_gpu
    else:
        with interpreting() as run:
            yield lambda *arguments, spacings=None: run(rehearsed, *arguments, spacings)


@pytest.fixture(scope="module")
def normals(kernel):
    """Standard normal numbers of the kernel, for two seeds."""
    return [kernel([torch.zeros(N)], [1.0], 1.0, seed, torch.float32)[0].astype(np.float64) for seed in SEEDS]


def correlation(a, b):
    return abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a))


def assert_normal(sample, std=1.0):
    """Moments and distribution: each of the first three lines fails one seed in 1.7 million, the last in 10,000."""
    sample, n = sample / std, sample.size
    assert abs(sample.mean()) * math.sqrt(n) < FIVE_SIGMA
    assert abs(sample.var() - 1) * math.sqrt(n / 2) < FIVE_SIGMA
    assert abs((sample**4).mean() - 3) * math.sqrt(n / 96) < FIVE_SIGMA
    assert stats.kstest(sample[:1_000_000], "norm").pvalue > 1e-4


def test_it_is_normal(normals):
    for sample in normals:
        assert_normal(sample)
        assert np.abs(sample).max() < 6.8  # sqrt(66 log 2), the largest that 2^-33 gives


def test_its_tails_are_those_of_a_normal_number(normals):
    """Counts beyond 3 and 4 (and 4.5) standard deviations, on each side; a line fails one seed in 100,000."""
    for sample in normals:
        for limit in (3.0, 4.0, 4.5):
            expected = stats.norm.sf(limit) * N
            for count in ((sample > limit).sum(), (sample < -limit).sum()):
                low, high = stats.poisson.ppf([5e-6, 1 - 5e-6], expected)
                assert low <= count <= high


def test_places_seeds_and_blocks_are_independent(normals):
    """Each line fails one seed in 1.7 million; squares too, since two numbers share a radius."""
    block, (first, second) = noise_kernel.BLOCK, normals
    for f in (lambda x: x, np.square):
        assert correlation(f(first), f(second)) < FIVE_SIGMA
        for lag in (1, 2, block, 2 * block, 3 * block, 4 * block, 8 * block):
            assert correlation(f(first[lag:]), f(first[:-lag])) < FIVE_SIGMA


def test_it_is_its_twin(normals):
    """Philox words and Box-Muller in float64, in numpy.

    Single numbers differ by more where the radius nearly vanishes: a float32 number below 1 is 2^-24 apart from it.
    """
    for sample, seed in zip(normals, SEEDS, strict=True):
        apart = np.abs(sample[:100_000] - twin(min(N, 100_000), seed))
        assert apart.max() < 4e-4
        assert np.quantile(apart, 0.999) < 1e-5 + grid_spacing(1.0) / 2


@pytest.mark.parametrize(("z", "divisor"), SETTINGS)
def test_the_last_bits_do_not_tell_whether_someone_was_there(kernel, z, divisor):
    """Noise added in float32 fails: 17 % and 4 % without the example (z = 1 and 4), and never with it."""
    worlds = [
        kernel([torch.full((N,), raw)], [z * TAU / divisor], 1 / divisor, seed, torch.float32)[0]
        for seed, raw in enumerate((0.0, TAU))
    ]
    assert_equally_often(*(finer_than_the_sum(world, divisor) for world in worlds))
    for world in worlds:
        assert_on_grid(world, grid_spacing(z * TAU / divisor))


def test_it_is_finer_than_float32(kernel):
    """What is left when it is rounded to float32 and subtracted is uniform, over half a spacing on either side.

    The last line fails one seed in 10,000.
    """
    count, fine = 40_001, [2.0**-45]
    (rounded,) = kernel([torch.zeros(count)], [1.0], 1.0, 5, torch.float32, spacings=fine)
    assert len(np.unique(rounded)) > 0.99 * count
    (rest,) = kernel([torch.from_numpy(-rounded)], [1.0], 1.0, 5, torch.float32, spacings=fine)
    apart = rest.astype(np.float64) / np.spacing(np.abs(rounded)).astype(np.float64)
    assert stats.kstest(apart, stats.uniform(-0.5, 1).cdf).pvalue > 1e-4


@cuda_only("the fast logarithm, which the interpreter cannot run")
def test_the_fast_logarithm_is_the_exact_one():
    with DEVICE:
        raws = [torch.zeros(N)]
        fast, exact = (launched(raws, [1.0], 1.0, 7, torch.float32, True, fast)[0] for fast in (True, False))
    np.testing.assert_allclose(fast, exact, rtol=5e-6, atol=1.001 * grid_spacing(1.0))  # neighbours on the grid


def test_each_tensor_has_its_own_noise(kernel):
    """Each line fails one seed in 1.7 million, but for `assert_normal`."""
    raws = [torch.full((N,), 4.0), torch.full((15,), 7.0), torch.arange(5000.0)]
    first, second, third = kernel(raws, [2.0, 0.0, 0.5], 0.5, 3, torch.float32)
    assert_normal(first.astype(np.float64) - 2, 2.0)
    assert np.array_equal(second, np.full(15, 3.5, dtype=np.float32))
    residue = third - 0.5 * np.arange(5000)
    assert_normal(residue, 0.5)
    assert correlation(first[:5000], residue) < FIVE_SIGMA


@cuda_only("16 bits, rounded to the nearest: the interpreter cuts off")
def test_it_is_rounded_once_at_the_end(kernel):
    raws = [torch.linspace(-3, 3, 6001)]
    (exact,) = kernel(raws, [0.7], 0.3, 11, torch.float32)
    (rounded,) = kernel(raws, [0.7], 0.3, 11, torch.bfloat16)
    assert np.array_equal(rounded, torch.from_numpy(exact).bfloat16().float().numpy())


@cuda_only("sums that do not lie at multiples of 16 bytes")
def test_sums_may_lie_anywhere():
    with DEVICE:
        wide = torch.arange(6001.0)
        (aligned,) = launched([wide[1:].clone()], [0.7], 0.3, 11, torch.float32, True, True)
        (shifted,) = launched([wide[1:]], [0.7], 0.3, 11, torch.float32, False, True)
        released = noise_kernel.noisy_sums(
            [wide[1:]], [1e-9], [grid_spacing(1e-9)], 0.3, NoiseSource(0).words(), torch.float32
        )
    assert np.array_equal(aligned, shifted)
    torch.testing.assert_close(released[0], 0.3 * wide[1:], rtol=1e-6, atol=0)


@cuda_only("a sum of more than 2^31 numbers")
def test_noise_of_many_numbers():
    """One seed in 10,000 fails, at either end."""
    require_memory(40)
    raws = [torch.zeros(2**31 + 12345, device=DEVICE)]
    (found,) = noise_kernel.noisy_sums(raws, [1.0], [grid_spacing(1.0)], 1.0, NoiseSource(0).words(), torch.bfloat16)
    for sample in (found[:100_000], found[-100_000:]):
        wide = sample.float() + (torch.rand_like(sample, dtype=torch.float32) - 0.5) * sample.float().abs() * 2.0**-8
        assert stats.kstest(wide.cpu().numpy(), "norm").pvalue > 1e-4


def value(size=N // 4):
    """Sums of several shapes and precisions, in two groups."""
    shapes = {"a": (size,), "b": (3, 50, 7), "c": (1,), "d": (size // 2, 2)}
    tensors = {name: torch.full(shape, 0.5, device=DEVICE) for name, shape in shapes.items()}
    tensors["wide"] = torch.zeros(5000, dtype=torch.float64, device=DEVICE)  # not for the kernel
    members = {name: int(name in "cd") for name in tensors}
    return noise.BoundedSum(tensors, members, (2.0, 3.0), noise.group_dims(tensors, members, 2))


def test_a_release_has_the_stated_noise():
    """In every tensor, over the divisor; independent between tensors and steps: 5 standard deviations each."""
    sums, source = value(), NoiseSource(4)
    if ON_GPU:
        assert all(noise_kernel.usable(sums.tensors[name], torch.float32) for name in "abcd")
    stds = noise.noise_stds(sums, 1.5)
    steps = [noise.release(sums, 1.5, source, divisor=4.0).tensors for _ in range(2)]
    found = [
        {name: (x.double() - sums.tensors[name] / 4).cpu().numpy().ravel() for name, x in noisy.items()}
        for noisy in steps
    ]
    for noisy in found:
        for name in ("a", "d", "wide"):
            std = stds[sums.members[name]] / 4
            assert_normal(noisy[name], std)
            assert_on_grid(noisy[name] + (0.125 if name != "wide" else 0), grid_spacing(std))
        length = len(noisy["b"])
        for name in ("a", "d"):
            assert correlation(noisy["b"], noisy[name][:length]) < FIVE_SIGMA
    for name in ("a", "b", "d", "wide"):
        assert correlation(found[0][name], found[1][name]) < FIVE_SIGMA


def test_the_same_seed_releases_the_same():
    """Bit for bit, in float32 and rounded to bfloat16; another seed and the next step release other numbers."""
    sums = value(5000)
    dtypes = {"b": torch.bfloat16}
    before = torch.get_rng_state()
    runs = []
    for seed in (0, 0, 1):
        source = NoiseSource(seed)
        runs.append([noise.release(sums, 1.5, source, dtypes=dtypes).tensors for _ in range(2)])
    for one, other in zip(runs[0], runs[1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert one["b"].dtype == torch.bfloat16
    (first, second), (_, other) = runs[0], (None, runs[2][0])
    for name in ("a", "b", "c", "d", "wide"):
        assert not torch.equal(first[name], second[name])
        assert not torch.equal(first[name], other[name])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_source_goes_on_where_its_state_was_saved():
    sums, source = value(5000), NoiseSource(9)
    noise.release(sums, 1.0, source)
    state = source.state_dict()
    expected = noise.release(sums, 1.0, source).tensors
    again = NoiseSource(1)
    again.load_state_dict(state)
    found = noise.release(sums, 1.0, again).tensors
    assert all(torch.equal(found[name], expected[name]) for name in expected)

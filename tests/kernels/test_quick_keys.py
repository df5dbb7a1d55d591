"""Codes of keys by one rounding equal those of two divisions and a rounding, ties and all."""

import numpy as np
import pytest

from kvstow.codec.tables import BOUNDARIES
from kvstow.kernels.specialise import DTYPES
from kvstow.scheme import KEY_BITS
from tests.kernels import emulated

pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="needs a g++ that knows float16, and ucontext"
)


def ordinary(rng, n):
    """Groups as a model's: of many sizes, some off centre."""
    sizes = 10.0 ** rng.uniform(-6, 4, (n, 1))
    return sizes * (rng.standard_normal((n, 32)) + rng.choice([0, 0, 0, 1, -30], (n, 1)))


def on_ties(rng, n, bits):
    """Elements on a tie or up to 40 floats off it, and offsets a little above the greatest too."""
    n_steps = 254 if bits == 8 else 2**bits - 1
    scale = 10.0 ** rng.uniform(-8, 6, (n, 1))
    low = rng.integers(-130, 131, (n, 1)) - (127 if bits == 8 else 0)
    low = ((low + rng.uniform(-0.6, 0.6, (n, 1))) * scale).astype(np.float32)
    high = (low + scale * n_steps).astype(np.float32)
    divisor = (high - low) / np.float32(n_steps) + np.float32(1e-8)
    offset = np.rint((high + low) / (2 * divisor) if bits == 8 else low / divisor)
    codes = rng.integers(-129, 129, (n, 32)) if bits == 8 else rng.integers(-1, 2**bits, (n, 32))
    x = ((codes + 0.5 + offset) * divisor.astype(np.float64)).astype(np.float32)
    nearby = np.where(rng.random(x.shape) < 0.5, rng.integers(-40, 41, x.shape), 0)
    x = np.clip((x.view(np.int32) + nearby.astype(np.int32)).view(np.float32), low, high)
    x[:, :1], x[:, 1:2] = low, high
    return x


def on_a_grid(rng, n, bits):
    """Whole numbers of a power of two: exact ties of a scale that the definition adds 1e-8 to."""
    most = 127 if bits == 8 else 2**bits - 1
    x = rng.integers(-4 * most, 4 * most + 1, (n, 32)) / 4.0
    ends = np.array([[most, -most], [most - 0.5, -most - 0.5], [most + 0.5, 0.5]])
    ends = ends[rng.integers(0, len(ends), n)]  # symmetric, or on ties that are clipped
    x = np.clip(x, ends[:, 1:], ends[:, :1])
    x[:, :2] = ends
    return x * 2.0 ** rng.integers(-20, 10, (n, 1))


def degenerate(rng, n):
    """Constants, zeros, one large element of many, and groups that are not finite."""
    x = np.where(rng.random((n, 32)) < 0.05, 10.0 ** rng.uniform(-30, 30, (n, 32)), 0)
    x[: n // 4] = 10.0 ** rng.uniform(-12, 8, (n // 4, 1)) * rng.choice([-1, 1], (n // 4, 1))
    x[: n // 8, 5] *= 1 + 2.0**-7
    x[-4:, 3] = [np.nan, np.inf, -np.inf, np.nan]
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", KEY_BITS)
def test_quick_codes_are_those_of_the_definition(rng, programs, bits, dtype):
    codes_of = emulated.key_codes(dtype, bits, programs)
    n = 3000
    for groups, least_possible in (
        (ordinary(rng, n), 0.7),
        (on_ties(rng, n, bits), 0.5),
        (on_a_grid(rng, n, bits), 0.2),
        (degenerate(rng, n), 0),
    ):
        for reciprocal_is_off in (-1, 0, 1):
            quick, defined, possible = codes_of(emulated.narrowed(groups, dtype), reciprocal_is_off)
            np.testing.assert_array_equal(quick[possible], defined[possible])
            assert possible.mean() >= least_possible
            assert not possible[~np.isfinite(groups).all(axis=1)].any()


@pytest.mark.parametrize("bits", [2, 3])
def test_boundaries_that_the_source_knows_are_those_of_the_table(programs, bits):
    np.testing.assert_array_equal(emulated.known_boundaries(bits, programs), BOUNDARIES[bits])

"""A new token is stored with the bits of the definition: the device source, run on the CPU."""

import numpy as np
import pytest

from kvstow.codec import reference
from kvstow.scheme import HEAD_DIMS
from tests.kernels import emulated

pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="needs a g++ that knows float16, and ucontext"
)
# Every width of a key and every width of a value.
WIDTHS = [(8, 3), (2, 5), (4, 2), (5, 4), (8, 8)]


def hard_vectors(rng, head_dim):
    """Ordinary ones, and what is lost, guarded or not finite: ``(n, d)``."""
    ordinary = rng.standard_normal((40, head_dim))
    of_every_size = ordinary * 10.0 ** rng.uniform(-9, 9, (40, 1))
    beside_outliers = ordinary + 30.0 * (rng.random((40, head_dim)) < 0.02)
    edges = np.repeat(rng.integers(-127, 128, (20, head_dim // 32)), 32, 1) * 0.25  # of one value
    ties = rng.integers(-127, 128, (20, head_dim)) * 0.5
    large = ordinary[:9] * 10.0 ** np.arange(4.5, 39, 4)[:, None]
    special = np.zeros((6, head_dim))
    special[1], special[2] = -0.0, 65504.0 * 3
    special[3:, :] = ordinary[:3]
    special[3, 7], special[4, 33], special[5, -1] = np.nan, np.inf, -np.inf
    parts = ordinary, of_every_size, beside_outliers, edges, ties, large, special
    with np.errstate(over="ignore"):
        return np.concatenate(parts).astype(np.float32)


def check(planes, keys, values, widths):
    wanted = (
        *reference.encode_keys(keys[:, None, None], bits=widths[0], guard=True),
        *reference.encode_values(values[:, None, None], bits=widths[1], guard=True),
    )
    for got, expected in zip(planes, wanted, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_stored_token_has_the_bits_of_the_definition(rng, programs, head_dim, widths):
    keys = hard_vectors(rng, head_dim)
    values = np.ascontiguousarray(keys[::-1])
    check(emulated.store(keys, values, widths, programs), keys, values, widths)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_elements_of_16_bits_are_stored_as_their_float32(rng, programs, dtype):
    narrow = emulated.narrowed(hard_vectors(rng, 128), dtype)
    bits = narrow.view(np.uint16).astype(np.uint32)
    wide = (bits << 16).view(np.float32) if dtype == "bfloat16" else narrow.astype(np.float32)
    reverse = np.ascontiguousarray(narrow[::-1])
    planes = emulated.store(narrow, reverse, (8, 3), programs, dtype)
    check(planes, wide, wide[::-1], (8, 3))

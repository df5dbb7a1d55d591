"""What a search promises: never a worse group, and much better ones on the whole."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.codec import reference
from kvstow.codec.search import MULTIPLES, PARITY, boundaries, count_below, halving_sum
from kvstow.codec.tables import BOUNDARIES
from kvstow.scheme import VALUE_BITS

# A loaded machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def rotated_groups(draw):
    """64 groups as the quantiser sees them: normal, heavy, few or equal elements, any size."""
    rng = np.random.default_rng(draw(seeds))
    match draw(st.sampled_from(["normal", "heavy", "sparse", "levels"])):
        case "normal":
            x = rng.standard_normal((32, 2, 32))
        case "heavy":
            x = rng.standard_normal((32, 2, 32)) ** 5
        case "sparse":
            x = rng.standard_normal((32, 2, 32)) * (rng.random((32, 2, 32)) < 0.1)
        case "levels":
            x = rng.choice([-1.0, 1.0], (32, 2, 32)) * rng.integers(1, 4, (32, 2, 1))
    x = x * 10.0 ** rng.uniform(-8, 8, (32, 2, 1))
    return x.reshape(32, 64).astype(np.float32)


def errors_of(values, packed, bits):
    """Squared error of each group in float64, in the rotated domain."""
    rotated = reference.rotate(values).astype(np.float64)
    decoded = reference.dequantize_values(packed, bits=bits, head_dim=values.shape[-1])
    return ((rotated - decoded) ** 2).reshape(*values.shape[:-1], -1, 32).sum(-1)


@unhurried
@given(rotated_groups(), st.sampled_from(VALUE_BITS))
def test_no_group_errs_more_than_without_a_search(rotated, bits):
    values = reference.unrotate(rotated)
    searched = reference.encode_values(values, bits=bits, guard=True, search=True)
    plain = reference.encode_values(values, bits=bits, guard=True)
    # Rounding the scale to float16 moves a group by up to 2**-11 of its length.
    lengths = (reference.rotate(values).astype(np.float64).reshape(32, 2, 32) ** 2).sum(-1)
    allowed = errors_of(values, plain, bits) * (1 + 1e-5) + 1.01 * lengths * 2.0**-22
    assert (errors_of(values, searched, bits) <= allowed).all()


# Measured on 2.5 million normal elements: 5.9, 20.0, 30.0, 30.4 and 39.2%.
@pytest.mark.parametrize(("bits", "gain"), [(2, 5.9), (3, 20.0), (4, 30.0), (5, 30.4), (8, 39.2)])
def test_a_search_lowers_the_error_of_normal_values(bits, gain):
    values = np.random.default_rng(7).standard_normal((8192, 128)).astype(np.float32)
    searched = reference.encode_values(values, bits=bits, search=True)
    plain = reference.encode_values(values, bits=bits)
    ratio = errors_of(values, searched, bits).mean() / errors_of(values, plain, bits).mean()
    assert 100 * (1 - ratio) == pytest.approx(gain, abs=1)


@unhurried
@given(rotated_groups(), st.sampled_from(VALUE_BITS))
def test_a_searched_scale_keeps_all_bits_of_float16_and_others_are_as_without(rotated, bits):
    values = reference.unrotate(rotated)
    searched = reference.encode_values(values, bits=bits, guard=True, search=True)
    plain = reference.encode_values(values, bits=bits, guard=True)
    # Away from the ends of the range by more than the rounding of the scale to float16.
    rms = plain.scales.astype(np.float32)
    inside = (rms > 1.001 * 2.0**-13) & (rms < 0.999 * 2.0**14)
    assert np.isfinite(searched.scales[inside]).all()
    assert (searched.scales[inside] >= 2.0**-14).all()
    outside = (rms < 0.999 * 2.0**-13) | (rms > 1.001 * 2.0**14)
    assert (searched.scales[outside] == plain.scales[outside]).all()
    codes = [
        reference.unpack_bits(p.codes, bits=bits).reshape(32, 2, 32) for p in (searched, plain)
    ]
    assert (codes[0][outside] == codes[1][outside]).all()


@pytest.mark.parametrize("bits", VALUE_BITS)
@pytest.mark.parametrize("guard", [False, True])
def test_zero_lost_and_huge_values_keep_the_bytes_they_have_without_a_search(rng, bits, guard):
    values = rng.standard_normal((7, 64)).astype(np.float32)
    values[0] = 0
    values[1, 5], values[2, 5], values[3, 5] = np.nan, np.inf, -np.inf
    values[4:] *= np.array([[1e-5], [1e10], [1e36]], np.float32)
    searched = reference.encode_values(values, bits=bits, guard=guard, search=True)
    plain = reference.encode_values(values, bits=bits, guard=guard)
    for got, want in zip(searched, plain, strict=True):
        assert got.tobytes() == want.tobytes()


def test_without_multiples_the_boundaries_are_those_of_the_table():
    for bits in VALUE_BITS:
        np.testing.assert_array_equal(boundaries(bits)[PARITY], BOUNDARIES[bits])
        assert boundaries(bits).shape == (len(MULTIPLES), 2**bits - 1)


def test_a_tie_takes_the_lower_code_and_nan_takes_0():
    edges = np.array([-1, 0, 1], np.float32)
    units = np.array([-2, -1, -0.5, 0, 1, 2, np.nan, np.inf], np.float32)
    assert count_below(units, edges).tolist() == [0, 0, 1, 1, 2, 3, 0, 3]


def test_halves_are_added_until_one_element_is_left():
    # Left to right, 1 is lost beside 2**24 each time; halves add the ones first.
    x = np.array([2.0**24, 1, -(2.0**24), 1], np.float32)
    assert float(halving_sum(x)) == 2
    assert halving_sum(np.ones((3, 5, 32), np.float32)).tolist() == [[32] * 5] * 3

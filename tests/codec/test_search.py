"""What a search promises: less error in the same bytes, and no bias along a value group."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.codec import reference
from kvstow.codec.candidates import UNIT
from kvstow.codec.search import (
    LARGEST_ZERO,
    SEARCHED_KEY_BITS,
    SEARCHED_KEYS,
    SEARCHED_VALUES,
    count_below,
    halving_sum,
)
from kvstow.scheme import KEY_BITS, VALUE_BITS

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


def groups_of(values, packed, bits):
    """Each group in float64, as it was and as it is read back, in the rotated domain."""
    rotated = reference.rotate(values).astype(np.float64)
    decoded = reference.dequantize_values(packed, bits=bits, head_dim=values.shape[-1])
    shape = (*values.shape[:-1], -1, 32)
    return rotated.reshape(shape), decoded.astype(np.float64).reshape(shape)


def cosines(values, packed, bits):
    groups, decoded = groups_of(values, packed, bits)
    lengths = np.linalg.norm(groups, axis=-1) * np.linalg.norm(decoded, axis=-1)
    return (groups * decoded).sum(-1) / np.where(lengths == 0, 1, lengths)


def is_searched(values, bits):
    """Groups well inside the range of scales that are searched."""
    rms = reference.encode_values(values, bits=bits).scales.astype(np.float64)
    return (rms > 1.001 * SEARCHED_VALUES[0]) & (rms < 0.999 * SEARCHED_VALUES[1])


@unhurried
@given(rotated_groups(), st.sampled_from(VALUE_BITS))
def test_no_value_group_errs_more_at_its_best_scale_than_without_a_search(rotated, bits):
    values = reference.unrotate(rotated)
    searched = reference.encode_values(values, bits=bits, guard=True, search=True)
    plain = reference.encode_values(values, bits=bits, guard=True)
    groups, decoded = groups_of(values, plain, bits)
    energy = np.maximum((groups**2).sum(-1), 1e-300)
    without = ((groups - decoded) ** 2).sum(-1) / energy
    sine = 1 - cosines(values, searched, bits) ** 2
    # Candidates are told apart to half a unit of the table per element, and half a place.
    assert (sine <= 1.05 * without + 0.5 / UNIT + 1e-3)[is_searched(values, bits)].all()


@unhurried
@given(rotated_groups(), st.sampled_from(VALUE_BITS))
def test_a_searched_group_keeps_its_length_along_itself(rotated, bits):
    values = reference.unrotate(rotated)
    searched = reference.encode_values(values, bits=bits, guard=True, search=True)
    groups, decoded = groups_of(values, searched, bits)
    energy = (groups**2).sum(-1)
    gain = (groups * decoded).sum(-1) / np.where(energy == 0, 1, energy)
    # The scale is rounded to float16; below a cosine squared of 1/2 it is held back.
    close = is_searched(values, bits) & (cosines(values, searched, bits) ** 2 > 0.501)
    assert (np.abs(gain - 1)[close] < 2.0**-10).all()
    assert (gain[is_searched(values, bits)] < 1 + 2.0**-10).all()
    errors = ((groups - decoded) ** 2).sum(-1)
    assert (errors <= energy * (1 + 2.0**-9)).all()


# Measured on 2.5 million normal elements: 1 - cosine squared falls by that many percent.
@pytest.mark.parametrize(("bits", "gain"), [(2, 6.0), (3, 20.7), (4, 32.3), (5, 34.4), (8, 51.7)])
def test_a_search_lowers_the_angle_of_normal_values(bits, gain):
    values = np.random.default_rng(7).standard_normal((8192, 128)).astype(np.float32)
    searched = reference.encode_values(values, bits=bits, search=True)
    plain = reference.encode_values(values, bits=bits)
    sine = {id(p): 1 - (cosines(values, p, bits) ** 2).mean() for p in (searched, plain)}
    # The plain error is taken with its own scale, the root mean square, as 2.5 million were.
    groups, decoded = groups_of(values, plain, bits)
    error = ((groups - decoded) ** 2).sum() / (groups**2).sum()
    assert 100 * (1 - sine[id(searched)] / error) == pytest.approx(gain, abs=1)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_without_a_search_values_are_read_back_too_short(rng, bits):
    """10.5, 2.8, 0.7 and 0.2% at 2, 3, 4 and 5 bits, and every token alike."""
    values = rng.standard_normal((2048, 128)).astype(np.float32)
    gains = []
    for search in (False, True):
        packed = reference.encode_values(values, bits=bits, search=search)
        groups, decoded = groups_of(values, packed, bits)
        gains.append((groups * decoded).sum() / (groups**2).sum())
    short = {2: 0.1054, 3: 0.0276, 4: 0.0066, 5: 0.00158, 8: 0}[bits]
    assert 1 - gains[0] == pytest.approx(short, rel=0.1, abs=5e-5)
    assert abs(1 - gains[1]) < 5e-5


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


# --- keys


@st.composite
def keys_of_any_offset(draw):
    """64 groups, each of its own magnitude and of an offset up to 10^4 times its range."""
    rng = np.random.default_rng(draw(seeds))
    offsets = rng.choice([0, 1, -1], (64, 1)) * 10.0 ** rng.uniform(-2, 4, (64, 1))
    x = (rng.standard_normal((64, 32)) ** draw(st.sampled_from([1, 3])) + offsets) * 10.0 ** (
        rng.uniform(-8, 8, (64, 1))
    )
    return x.astype(np.float32)


def key_errors(keys, packed, bits):
    """Squared error of each group, in float64."""
    decoded = reference.dequantize_keys(packed, bits=bits).astype(np.float64)
    return ((decoded - keys) ** 2).reshape(*keys.shape[:-1], -1, 32).sum(-1)


@unhurried
@given(keys_of_any_offset(), st.booleans())
def test_a_searched_key_group_errs_by_less_than_a_step_everywhere(keys, guard):
    bits = SEARCHED_KEY_BITS
    searched = reference.encode_keys(keys, bits=bits, guard=guard, search=True)
    plain = reference.encode_keys(keys, bits=bits, guard=guard)
    assert reference.count_nonfinite(searched) <= reference.count_nonfinite(plain)
    scales = plain.scales.astype(np.float64)
    inside = (scales > 1.001 * SEARCHED_KEYS[0]) & (scales < 0.999 * SEARCHED_KEYS[1])
    zeros = np.abs(plain.zeros.astype(np.float64))
    inside &= zeros < LARGEST_ZERO
    decoded = reference.dequantize_keys(searched, bits=bits).astype(np.float64)
    steps = (
        np.abs(decoded - keys)[inside[:, 0]] / searched.scales.astype(np.float64)[inside][:, None]
    )
    # Half a step is rounding; the rest is an end that is cut.
    assert (steps < 0.75).all()
    assert (searched.zeros[inside] * 4 % 1 == 0).all()
    for got, want in zip(searched, plain, strict=True):
        outside = ((scales < 0.999 * SEARCHED_KEYS[0]) | (zeros > LARGEST_ZERO))[:, 0]
        assert got[outside].tobytes() == want[outside].tobytes()
    if guard:
        assert np.isfinite(decoded).all()


def test_a_search_lowers_the_error_of_normal_keys():
    """By 17.6% on 2.5 million elements."""
    keys = np.random.default_rng(7).standard_normal((8192, 128)).astype(np.float32)
    searched = reference.encode_keys(keys, bits=8, search=True)
    plain = reference.encode_keys(keys, bits=8)
    ratio = key_errors(keys, searched, 8).mean() / key_errors(keys, plain, 8).mean()
    assert 100 * (1 - ratio) == pytest.approx(17.6, abs=1)


def test_a_group_around_0_with_one_outlier_errs_less_too(rng):
    keys = 0.01 * rng.standard_normal((256, 32)).astype(np.float32)
    keys[:, 7] = 20 + rng.random(256)
    searched = reference.encode_keys(keys, bits=8, search=True)
    plain = reference.encode_keys(keys, bits=8)
    before, after = (key_errors(keys, p, 8).mean() for p in (plain, searched))
    assert after < before


@pytest.mark.parametrize("bits", sorted({*KEY_BITS} - {SEARCHED_KEY_BITS}))
def test_keys_of_other_widths_keep_the_bytes_they_have_without_a_search(rng, bits):
    keys = rng.standard_normal((64, 128)).astype(np.float32)
    searched = reference.encode_keys(keys, bits=bits, search=True)
    plain = reference.encode_keys(keys, bits=bits)
    for got, want in zip(searched, plain, strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("bits", KEY_BITS)
@pytest.mark.parametrize("guard", [False, True])
def test_lost_zero_constant_and_extreme_keys_keep_the_bytes_they_have_without(rng, bits, guard):
    keys = rng.standard_normal((9, 32)).astype(np.float32)
    keys[0], keys[1], keys[2] = 0, 0.5, 1e-30
    keys[3, 5], keys[4, 5], keys[5, 5] = np.nan, np.inf, -np.inf
    keys[6:] *= np.array([[1e-30], [1e10], [1e36]], np.float32)
    searched = reference.encode_keys(keys, bits=bits, guard=guard, search=True)
    plain = reference.encode_keys(keys, bits=bits, guard=guard)
    for got, want in zip(searched, plain, strict=True):
        assert got.tobytes() == want.tobytes()


# --- parts


def test_a_tie_takes_the_lower_code_and_nan_takes_0():
    edges = np.array([-1, 0, 1], np.float32)
    units = np.array([-2, -1, -0.5, 0, 1, 2, np.nan, np.inf], np.float32)
    assert count_below(units, edges).tolist() == [0, 0, 1, 1, 2, 3, 0, 3]


def test_halves_are_added_until_one_element_is_left():
    # Left to right, 1 is lost beside 2**24 each time; halves add the ones first.
    x = np.array([2.0**24, 1, -(2.0**24), 1], np.float32)
    assert float(halving_sum(x)) == 2
    assert halving_sum(np.ones((3, 5, 32), np.float32)).tolist() == [[32] * 5] * 3

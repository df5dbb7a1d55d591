"""The guarded encoder stores every finite vector, and changes nothing that was sane."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow.codec import reference
from kvstow.scheme import KEY_BITS, VALUE_BITS

# A loaded machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
ROWS = 16
kinds = st.sampled_from(["centred", "offset", "constant", "one-hot", "subnormal", "any bits"])


@st.composite
def finite_vectors(draw, head_dim=64):
    """Rows of one kind, each row of its own magnitude between 1e-8 and 1e8."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (ROWS, head_dim)
    magnitude = 10.0 ** rng.uniform(-8, 8, (ROWS, 1))
    normal = rng.standard_normal(shape)
    match draw(kinds):
        case "centred":
            x = normal * magnitude
        case "offset":
            x = (rng.choice([-1, 1], (ROWS, 1)) + normal * 10.0 ** rng.uniform(-6, 0)) * magnitude
        case "constant":
            x = np.broadcast_to(magnitude * rng.choice([-1, 1], (ROWS, 1)), shape)
        case "one-hot":
            x = np.eye(head_dim)[rng.integers(0, head_dim, ROWS)] * normal[:, :1] * magnitude
        case "subnormal":
            x = normal * 1e-38 * 10.0 ** -rng.uniform(0, 7, (ROWS, 1))
        case "any bits":
            x = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
            x = np.where(np.isfinite(x), x, 0)
    return x.astype(np.float32)


def groups_of(x):
    return x.reshape(*x.shape[:-1], -1, 32)


def is_sane(keys):
    scales, zeros = keys.scales.astype(np.float32), keys.zeros
    return (scales >= 2.0**-16) & np.isfinite(scales) & np.isfinite(zeros)


@unhurried
@given(finite_vectors(), st.sampled_from(KEY_BITS))
def test_finite_keys_decode_to_finite_keys(keys, bits):
    packed = reference.encode_keys(keys, bits=bits, guard=True)
    assert reference.count_nonfinite(packed) == 0
    assert np.isfinite(reference.decode_keys(packed, bits=bits)).all()
    assert np.isfinite(reference.decode_keys(packed, bits=bits, dtype=np.float16)).all()


@unhurried
@given(finite_vectors(), st.sampled_from(VALUE_BITS))
def test_finite_values_decode_to_finite_values(values, bits):
    values = np.clip(values, -(2.0**100), 2.0**100)
    packed = reference.encode_values(values, bits=bits, guard=True)
    assert reference.count_nonfinite(packed) == 0
    assert np.isfinite(reference.decode_values(packed, bits=bits, head_dim=64)).all()


@unhurried
@given(finite_vectors(), st.sampled_from(KEY_BITS))
def test_keys_that_parity_stores_sanely_keep_their_bytes(keys, bits):
    parity = reference.encode_keys(keys, bits=bits)
    guarded = reference.encode_keys(keys, bits=bits, guard=True)
    keep = is_sane(parity) | (groups_of(keys) == 0).all(axis=-1)
    for want, got in zip(parity, guarded, strict=True):
        planes = [plane.reshape(*keep.shape, -1)[keep] for plane in (want, got)]
        assert planes[0].tobytes() == planes[1].tobytes()


@unhurried
@given(finite_vectors(), st.sampled_from(VALUE_BITS))
def test_values_within_float16_keep_their_bytes(values, bits):
    parity = reference.encode_values(values, bits=bits)
    guarded = reference.encode_values(values, bits=bits, guard=True)
    keep = np.isfinite(parity.scales)
    for want, got in zip(parity, guarded, strict=True):
        planes = [plane.reshape(*keep.shape, -1)[keep] for plane in (want, got)]
        assert planes[0].tobytes() == planes[1].tobytes()


@unhurried
@given(finite_vectors(), st.sampled_from(KEY_BITS))
def test_guarded_keys_err_by_half_a_step(keys, bits):
    guarded = ~is_sane(reference.encode_keys(keys, bits=bits))
    packed = reference.encode_keys(keys, bits=bits, guard=True)
    scales = packed.scales.astype(np.float32)[..., None]
    inside = guarded & (scales[..., 0] < 65504)  # at the largest scale it may saturate
    error = np.abs(groups_of(reference.decode_keys(packed, bits=bits)) - groups_of(keys))
    # 2**-8 of a step is the float32 rounding of x / scale, near 2**15 steps.
    assert (error <= scales * (0.5 + 2.0**-8))[inside].all()
    assert (error <= 3e-8)[inside & (scales[..., 0] == 2.0**-24)].all()


@unhurried
@given(st.floats(-8, 7), st.booleans(), st.sampled_from(KEY_BITS))
def test_constant_keys_decode_within_a_half_per_mille(exponent, negative, bits):
    value = np.float32((-1 if negative else 1) * 10.0**exponent)
    packed = reference.encode_keys(np.full(32, value), bits=bits, guard=True)
    error = np.abs(reference.decode_keys(packed, bits=bits) - value).max()
    assert error <= max(4.9e-4 * abs(value), 3e-8)


@pytest.mark.parametrize("bits", KEY_BITS)
@pytest.mark.parametrize("value", [-3e38, -5e9, 5e9, 3e38])
def test_keys_beyond_the_range_saturate_with_their_sign(bits, value):
    packed = reference.encode_keys(np.full(32, value, np.float32), bits=bits, guard=True)
    decoded = reference.decode_keys(packed, bits=bits)
    assert (np.sign(decoded) == np.sign(value)).all()
    assert (np.abs(decoded) >= 4e9).all()


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_values_beyond_the_range_saturate(rng, bits):
    values = (rng.standard_normal((4, 64)) * 1e20).astype(np.float32)
    packed = reference.encode_values(values, bits=bits, guard=True)
    assert (packed.scales == 65504).all()
    codes = reference.unpack_bits(packed.codes, bits=bits)
    assert ((codes == 0) | (codes == 2**bits - 1)).all()


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_values_beyond_two_to_the_hundred_count_as_lost(bits):
    values = np.full((1, 64), 2.0**100, np.float32)
    assert reference.count_nonfinite(reference.encode_values(values, bits=bits, guard=True)) == 0
    values[0, 5] *= 1.0001
    assert reference.count_nonfinite(reference.encode_values(values, bits=bits, guard=True)) == 2


@pytest.mark.parametrize("bits", KEY_BITS)
def test_parity_loses_what_the_guard_keeps(bits):
    keys = np.full(32, 0.5, np.float32)
    parity = reference.encode_keys(keys, bits=bits)
    assert np.isnan(reference.decode_keys(parity, bits=bits)).all()
    guarded = reference.encode_keys(keys, bits=bits, guard=True)
    np.testing.assert_allclose(reference.decode_keys(guarded, bits=bits), 0.5, rtol=4.9e-4)

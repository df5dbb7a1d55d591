"""The MLX codec equals the numpy definition bit for bit, on vectors of every kind."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstow.codec import affine, reference
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.codec.search import MULTIPLES
from kvstow.codec.tables import BOUNDARIES
from kvstow.errors import SchemeError, UnsupportedModel
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS

mx = pytest.importorskip("mlx.core")
from kvstow.codec import mlx, mlx_places  # noqa: E402

pytestmark = pytest.mark.mlx

# A loaded machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(["normal", "magnitudes", "offset", "constant", "ties", "special", "bits"])
shapes = hnp.array_shapes(min_dims=0, max_dims=3, max_side=5)


def make(kind, seed, shape):
    """float32 vectors of `kind`, each with a magnitude of its own where that matters."""
    rng = np.random.default_rng(seed)
    rows = (*shape[:-1], 1)
    normal = rng.standard_normal(shape)
    match kind:
        case "normal":
            x = normal
        case "magnitudes":
            x = normal * 10.0 ** rng.uniform(-44, 38, rows)
        case "offset":
            x = (normal * 10.0 ** rng.uniform(-6, 1, rows) + 1) * 10.0 ** rng.uniform(-8, 8, rows)
        case "constant":
            x = np.broadcast_to(rng.choice([-1, 1], rows) * 10.0 ** rng.uniform(-9, 9, rows), shape)
        case "ties":
            x = rng.integers(-8, 9, shape) / 8
        case "special":
            x = rng.choice([np.nan, np.inf, -np.inf, 0, -0.0, 1, 65504], shape) * normal
        case "bits":
            return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        return x.astype(np.float32)


def assert_same(got, want):
    """Equal dtype, shape and bits, except that all NaN are equal and so are both zeros."""
    np.testing.assert_array_equal(np.array(got), want, strict=True)


def assert_same_planes(got, want):
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


@unhurried
@given(kinds, seeds, shapes, st.sampled_from([32, 64, 96, 128]), st.booleans(), st.booleans())
def test_keys_equal_the_definition(kind, seed, lead, head_dim, guard, search):
    keys = make(kind, seed, (*lead, head_dim))
    for bits in KEY_BITS:
        want = reference.encode_keys(keys, bits=bits, guard=guard, search=search)
        got = mlx.encode_keys(mx.array(keys), bits=bits, guard=guard, search=search)
        assert_same_planes(got, want)
        assert_same(mlx.decode_keys(got, bits=bits), reference.decode_keys(want, bits=bits))
        assert mlx.count_nonfinite(got) == reference.count_nonfinite(want)


@unhurried
@given(kinds, seeds, shapes, st.sampled_from(HEAD_DIMS), st.booleans(), st.booleans())
def test_values_equal_the_definition(kind, seed, lead, head_dim, guard, search):
    values = make(kind, seed, (*lead, head_dim))
    for bits in VALUE_BITS:
        want = reference.encode_values(values, bits=bits, guard=guard, search=search)
        got = mlx.encode_values(mx.array(values), bits=bits, guard=guard, search=search)
        assert_same_planes(got, want)
        how = {"bits": bits, "head_dim": head_dim}
        assert_same(mlx.dequantize_values(got, **how), reference.dequantize_values(want, **how))
        assert_same(mlx.decode_values(got, **how), reference.decode_values(want, **how))
        assert mlx.count_nonfinite(got) == reference.count_nonfinite(want)


@pytest.mark.parametrize("guard", [False, True], ids=["parity", "guarded"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_prompt_of_many_tokens_equals_the_definition(head_dim, guard):
    # Many elements take another path than few: see `mlx_places.places_of`.
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((1, 2, 131072 // head_dim, head_dim)).astype(np.float32)
    for bits in KEY_BITS:
        want = reference.encode_keys(x, bits=bits, guard=guard)
        assert_same_planes(mlx.encode_keys(mx.array(x), bits=bits, guard=guard), want)
    for bits in VALUE_BITS:
        want = reference.encode_values(x, bits=bits, guard=guard)
        assert_same_planes(mlx.encode_values(mx.array(x), bits=bits, guard=guard), want)


@pytest.mark.parametrize("kind", ["normal", "magnitudes", "ties", "special", "bits"])
def test_a_searched_prompt_of_many_tokens_equals_the_definition(kind):
    x = make(kind, 5, (2, 2200, 64))
    if kind == "ties":  # also where an element lies on a boundary under some multiple
        edges = np.concatenate([np.outer(MULTIPLES, BOUNDARIES[b]).ravel() for b in VALUE_BITS])
        units = np.random.default_rng(6).choice(edges, x.shape)
        x = reference.unrotate(units.astype(np.float32))
    for bits in KEY_BITS:
        want = reference.encode_keys(x, bits=bits, guard=True, search=True)
        assert_same_planes(mlx.encode_keys(mx.array(x), bits=bits, guard=True, search=True), want)
    for bits in VALUE_BITS:
        want = reference.encode_values(x, bits=bits, guard=True, search=True)
        assert_same_planes(mlx.encode_values(mx.array(x), bits=bits, guard=True, search=True), want)


@pytest.mark.parametrize("n_units", [200, 20_000])
@pytest.mark.parametrize("bits", VALUE_BITS)
def test_a_unit_near_any_boundary_is_placed_as_numpy_does(bits, n_units):
    edges = BOUNDARIES[bits]
    near = np.concatenate([ulps_around(edge, 2) for edge in edges])
    ends = np.array([-3e38, -np.inf, -0.0, 0.0, 3e38, np.inf], np.float32)
    units = np.resize(np.concatenate([ends, near[~np.isnan(near)]]), n_units)
    got = mlx_places.places_of(mx.array(units), mlx_places.Edges.of(edges))
    np.testing.assert_array_equal(np.array(got), np.searchsorted(edges, units, side="left"))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_is_widened_before_anything_else(rng, dtype):
    x = mx.array(rng.standard_normal((2, 7, 128)).astype(np.float32)).astype(dtype)
    wide = np.array(x.astype(mx.float32))
    for bits in KEY_BITS:
        want = reference.encode_keys(wide, bits=bits, guard=True)
        assert_same_planes(mlx.encode_keys(x, bits=bits, guard=True), want)
    for bits in VALUE_BITS:
        want = reference.encode_values(wide, bits=bits, guard=True)
        assert_same_planes(mlx.encode_values(x, bits=bits, guard=True), want)


@unhurried
@given(kinds, seeds, st.integers(1, 70), st.integers(1, 20), st.booleans())
def test_tokens_encoded_in_pieces_have_the_bytes_of_all_at_once(
    kind, seed, n_tokens, piece, better
):
    x = mx.array(make(kind, seed, (2, n_tokens, 64)))
    encode_keys = partial(mlx.encode_keys, search=better)
    encode_values = partial(mlx.encode_values, search=better)
    for encode, widths in ((encode_keys, KEY_BITS), (encode_values, VALUE_BITS)):
        for bits in widths:
            at_once = encode(x, bits=bits, guard=True)
            pieces = [
                encode(x[:, start : start + piece], bits=bits, guard=True)
                for start in range(0, n_tokens, piece)
            ]
            for whole, *parts in zip(at_once, *pieces, strict=True):
                assert np.array(whole).tobytes() == np.array(mx.concatenate(parts, 1)).tobytes()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_strided_window_decodes_as_its_copy(rng, head_dim):
    x = mx.array(rng.standard_normal((2, 3, 40, head_dim)).astype(np.float32))
    for bits in KEY_BITS:
        packed = mlx.encode_keys(x, bits=bits)
        window = PackedKeys(*(plane[..., 3:17, :] for plane in packed))
        want = np.array(mlx.decode_keys(packed, bits=bits))[..., 3:17, :]
        assert_same(mlx.decode_keys(window, bits=bits), want)
    for bits in VALUE_BITS:
        packed = mlx.encode_values(x, bits=bits)
        window = PackedValues(*(plane[..., 3:17, :] for plane in packed))
        want = np.array(mlx.decode_values(packed, bits=bits, head_dim=head_dim))[..., 3:17, :]
        assert_same(mlx.decode_values(window, bits=bits, head_dim=head_dim), want)


def ulps_around(x, n=20):
    """The float32 neighbours of `x`."""
    bits = np.float32(x).view(np.int32) + np.arange(-n, n + 1, dtype=np.int32)
    return bits.view(np.float32)


# Scales around 2**-16, where the guard begins, and around 65504 and 65520, where float16 ends.
@pytest.mark.parametrize("scale", [255.5 * 2.0**-24, 2.0**-16, 65504, 65520])
@pytest.mark.parametrize("bits", KEY_BITS)
def test_the_guard_begins_at_the_same_key_scale(bits, scale):
    high = ulps_around(scale * affine.n_steps(bits))
    keys = np.zeros((len(high), 32), np.float32)
    keys[:, 0], keys[:, 1] = high, high / 3
    want = reference.encode_keys(keys, bits=bits, guard=True)
    assert_same_planes(mlx.encode_keys(mx.array(keys), bits=bits, guard=True), want)


@pytest.mark.parametrize("zero", [-65520, -65519.5, 65503.5, 65504, 65519.5, 65520])
@pytest.mark.parametrize("bits", KEY_BITS)
def test_the_guard_begins_at_the_same_key_zero(bits, zero):
    low = zero - (affine.n_steps(bits) / 2 if bits == 8 else 0)
    keys = np.full((41, 32), low, np.float32)
    keys[:, 0] = ulps_around(low + affine.n_steps(bits))
    want = reference.encode_keys(keys, bits=bits, guard=True)
    assert_same_planes(mlx.encode_keys(mx.array(keys), bits=bits, guard=True), want)


def test_the_guard_begins_at_the_same_value_scale(rng):
    vectors = rng.standard_normal((400, 64)).astype(np.float32)
    rms = np.sqrt(np.mean(reference.rotate(vectors)[:, :32] ** 2, axis=-1, keepdims=True))
    values = (np.linspace(65500, 65524, 400)[:, None] * vectors / rms).astype(np.float32)
    one_hot = np.eye(64, dtype=np.float32)[0] * ulps_around(8 * 65520)[:, None]  # even groups
    values = np.concatenate([values, one_hot, np.full((1, 64), 2.0**100, np.float32)])
    for bits in VALUE_BITS:
        want = reference.encode_values(values, bits=bits, guard=True)
        assert_same_planes(mlx.encode_values(mx.array(values), bits=bits, guard=True), want)


def test_no_tokens_encode_to_no_bytes_and_back():
    nothing = np.zeros((1, 3, 0, 64), np.float32)
    for bits in KEY_BITS:
        want = reference.encode_keys(nothing, bits=bits, guard=True)
        got = mlx.encode_keys(mx.array(nothing), bits=bits, guard=True)
        assert_same_planes(got, want)
        assert_same(mlx.decode_keys(got, bits=bits), nothing)
    for bits in VALUE_BITS:
        want = reference.encode_values(nothing, bits=bits, guard=True)
        got = mlx.encode_values(mx.array(nothing), bits=bits, guard=True)
        assert_same_planes(got, want)
        assert_same(mlx.decode_values(got, bits=bits, head_dim=64), nothing)


def test_constants_serve_every_thread(rng):
    values = rng.standard_normal((5, 64)).astype(np.float32)
    want = reference.encode_values(values, bits=3)

    def encode():
        return [np.array(plane) for plane in mlx.encode_values(mx.array(values), bits=3)]

    with ThreadPoolExecutor(1) as other:
        assert_same_planes(other.submit(encode).result(), want)
    assert_same_planes(encode(), want)


@st.composite
def codes_and_bits(draw):
    bits = draw(st.sampled_from(VALUE_BITS))
    shape = (*draw(hnp.array_shapes(max_dims=3, max_side=3)), 32 * draw(st.integers(1, 4)))
    return draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1))), bits


@unhurried
@given(codes_and_bits())
def test_codes_pack_to_the_bytes_of_the_definition(case):
    codes, bits = case
    want = reference.pack_bits(codes, bits=bits)
    assert_same(mlx.pack_bits(mx.array(codes), bits=bits), want)


@unhurried
@given(codes_and_bits())
def test_unpacking_undoes_packing(case):
    codes, bits = case
    packed = mx.array(reference.pack_bits(codes, bits=bits))
    assert_same(mlx.unpack_bits(packed, bits=bits), codes)


def test_decoding_to_a_dtype_rounds_and_clamps_as_the_definition_does(rng):
    x = (rng.standard_normal((3, 64)) * 40000).astype(np.float32)
    packed = mlx.encode_keys(mx.array(x), bits=8)
    want = reference.decode_keys(reference.encode_keys(x, bits=8), bits=8, dtype=np.float16)
    assert_same(mlx.decode_keys(packed, bits=8, dtype=mx.float16), want)
    assert mlx.decode_keys(packed, bits=8, dtype=mx.bfloat16).dtype == mx.bfloat16
    halves = mlx.narrow(mx.array([1e9, -70000.0, 65530.0, float("nan"), 1.5]), mx.float16)
    assert_same(halves, np.array([65504, -65504, 65504, np.nan, 1.5], np.float16))


def test_the_float32_of_numpy_and_mlx_agree_on_every_float16():
    bits = np.arange(2**16, dtype=np.uint16)
    halves = mx.array(bits).view(mx.float16)
    assert_same(halves.astype(mx.float32), bits.view(np.float16).astype(np.float32))


def test_refusals_are_those_of_the_definition():
    zeros = mx.zeros((1, 96))
    with pytest.raises(SchemeError, match="key bits"):
        mlx.encode_keys(zeros, bits=3)
    with pytest.raises(SchemeError, match="value bits"):
        mlx.encode_values(zeros, bits=1)
    with pytest.raises(UnsupportedModel, match="got 96"):
        mlx.encode_values(zeros, bits=3)
    with pytest.raises(UnsupportedModel, match="multiple of 32"):
        mlx.encode_keys(mx.zeros((1, 80)), bits=8)

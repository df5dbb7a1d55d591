"""Attention on MLX arrays equals the definition, on both of its paths."""

from itertools import product

import numpy as np
import pytest

from kvstow.attention import reference
from kvstow.codec import reference as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, Turbo

mx = pytest.importorskip("mlx.core")
attention = pytest.importorskip("kvstow.attention.mlx")

pytestmark = pytest.mark.mlx

# Elements are of order 1. Sums of up to 512 products in another order, a softmax whose
# exponents carry that error, and the rotation, whose sums run over other elements.
ATOL = 1e-5
# Half precision rounds queries, weights, the decoded window and the output: 2**-11, 2**-8.
ATOL_OF = {"float16": 2e-3, "bfloat16": 1.5e-2}
WIDTHS = list(product(KEY_BITS, VALUE_BITS))
PATHS = {"products": 10**9, "host": 0}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Forces one of the two paths, whatever the number of query rows."""
    monkeypatch.setattr(attention, "MAX_PRODUCT_ROWS", PATHS[request.param])


on_both_paths = pytest.mark.usefixtures("path")


def encoded(rng, scheme, b, h, t, d):
    k, v = rng.standard_normal((2, b, h, t, d)).astype(np.float32)
    return (
        codec.encode_keys(k, bits=scheme.key_bits, guard=True),
        codec.encode_values(v, bits=scheme.value_bits, guard=True),
    )


def to_window(keys, values, scheme, capacity=None, fill=None):
    """The planes on MLX, `fill` standing after the last token up to `capacity`."""
    n_tokens = keys.codes.shape[2]

    def widen(plane, filler):
        rest = np.full((*plane.shape[:2], (capacity or n_tokens) - n_tokens, plane.shape[3]), 0)
        rest = (rest + filler).astype(plane.dtype)
        return mx.array(np.concatenate([plane, rest], axis=2))

    codes, scale = (0, 0) if fill is None else fill
    return attention.PackedWindow(
        PackedKeys(widen(keys.codes, codes), widen(keys.scales, scale), widen(keys.zeros, scale)),
        PackedValues(widen(values.codes, codes), widen(values.scales, scale)),
        n_tokens,
        scheme,
    )


def compare(rng, scheme, shape, mask=None, atol=ATOL, **window):
    b, hq, h, n_queries, t, d = shape
    q = rng.standard_normal((b, hq, n_queries, d)).astype(np.float32)
    keys, values = encoded(rng, scheme, b, h, t, d)
    wanted = reference.attend(q, keys, values, scheme=scheme, scale=d**-0.5, mask=mask)
    on_mlx = mx.array(mask) if isinstance(mask, np.ndarray) else mask
    packed = to_window(keys, values, scheme, **window)
    got = attention.attend(mx.array(q), packed, scale=d**-0.5, mask=on_mlx)
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), wanted, rtol=0, atol=atol)
    assert np.abs(wanted).max() > 100 * atol


@on_both_paths
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", WIDTHS, ids="k{0[0]}v{0[1]}".format)
def test_attention_equals_the_definition_at_every_width_and_head_dim(rng, bits, head_dim):
    compare(rng, Turbo(*bits), (1, 4, 2, 2, 37, head_dim), "causal")


def boolean(rng, *shape):
    mask = rng.random(shape) < 0.5
    mask[..., -1] = True  # every query sees something
    return mask


MASKS = {
    "none": lambda *_: None,
    "causal": lambda *_: "causal",
    "bool_l_t": lambda rng, _b, _hq, n, t: boolean(rng, n, t),
    "bool_1_1_l_t": lambda rng, _b, _hq, n, t: boolean(rng, 1, 1, n, t),
    "bool_b_1_1_t": lambda rng, b, _hq, _n, t: boolean(rng, b, 1, 1, t),
    "bool_b_hq_l_t": lambda rng, b, hq, n, t: boolean(rng, b, hq, n, t),
    "added_l_t": lambda rng, _b, _hq, n, t: rng.normal(0, 3, (n, t)).astype(np.float32),
    "added_b_1_l_t": lambda rng, b, _hq, n, t: rng.normal(0, 3, (b, 1, n, t)).astype(np.float32),
    "added_1_hq_1_t": lambda rng, _b, hq, _n, t: rng.normal(0, 3, (1, hq, 1, t)).astype(np.float32),
    "added_inf": lambda rng, _b, _hq, n, t: np.where(boolean(rng, n, t), 0, -np.inf).astype(
        np.float32
    ),
}


@on_both_paths
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("n_queries", [1, 2, 8, 40])
@pytest.mark.parametrize("heads_per_kv_head", [1, 2, 3, 7])
def test_attention_equals_the_definition_for_every_mask_and_grouping(
    rng, heads_per_kv_head, n_queries, mask
):
    b, h, t = 2, 2, 41
    shape = (b, heads_per_kv_head * h, h, n_queries, t, 64)
    compare(rng, Turbo(), shape, MASKS[mask](rng, b, shape[1], n_queries, t))


@on_both_paths
@pytest.mark.parametrize("t", [1, 2, 33, 255, 256, 257, 300])
@pytest.mark.parametrize("n_queries", [1, 2])
def test_attention_equals_the_definition_at_every_length(rng, t, n_queries):
    compare(rng, Turbo(), (1, 3, 1, min(n_queries, t), t, 64), "causal", capacity=512)


GARBAGE = {
    "inf": (77, np.inf),
    "nan": (-1, np.nan),
    "huge": (127, 65504.0),
    "negative": (3, -65504.0),
}


@on_both_paths
@pytest.mark.parametrize("fill", GARBAGE)
@pytest.mark.parametrize("n_queries", [1, 3, 40])
def test_what_lies_behind_the_last_token_is_not_seen(rng, fill, n_queries):
    shape = (2, 6, 2, n_queries, 41, 64)
    compare(rng, Turbo(), shape, "causal", capacity=256, fill=GARBAGE[fill])
    compare(rng, Turbo(), shape, None, capacity=256, fill=GARBAGE[fill])


@on_both_paths
@pytest.mark.parametrize("dtype", ATOL_OF)
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("n_queries", [1, 5])
def test_half_precision_queries_get_that_precision_back(rng, dtype, mask, n_queries):
    d, scheme = 128, Turbo()
    keys, values = encoded(rng, scheme, 1, 2, 50, d)
    q = mx.array(rng.standard_normal((1, 4, n_queries, d)).astype(np.float32))
    q = q.astype(getattr(mx, dtype))
    exact = np.array(q.astype(mx.float32))
    wanted = reference.attend(exact, keys, values, scheme=scheme, scale=d**-0.5, mask=mask)
    got = attention.attend(q, to_window(keys, values, scheme), scale=d**-0.5, mask=mask)
    assert got.dtype == q.dtype
    got = np.array(got.astype(mx.float32))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL_OF[dtype])


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU has one path")
def test_few_query_rows_take_the_products_and_many_take_the_hosts_attention(rng, monkeypatch):
    keys, values = encoded(rng, Turbo(), 1, 2, 40, 64)
    window = to_window(keys, values, Turbo())
    seen = []
    monkeypatch.setattr(attention, "_products", lambda q, *_: seen.append(q.shape[2]) or q)
    for n_queries in (1, 16, 17, 40):  # 2 query heads for each KV head
        q = mx.zeros((1, 4, n_queries, 64))
        attention.attend(q, window, scale=1.0, mask="causal")
    assert attention.MAX_PRODUCT_ROWS == 32
    assert seen == [1, 16]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", WIDTHS, ids="k{0[0]}v{0[1]}".format)
def test_an_eager_window_is_what_the_definition_decodes_bit_for_bit(rng, bits, head_dim):
    scheme = Turbo(*bits)
    keys, values = encoded(rng, scheme, 1, 2, 19, head_dim)
    window = to_window(keys, values, scheme, capacity=256)
    k, v = attention.decode_window(window, mx.float32, rotated=False)
    wanted_k = codec.decode_keys(keys, bits=bits[0])
    wanted_v = codec.decode_values(values, bits=bits[1], head_dim=head_dim)
    assert np.array(k).tobytes() == wanted_k.tobytes()
    assert np.array(v).tobytes() == wanted_v.tobytes()


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_a_deferred_window_holds_the_values_before_the_unrotation(rng, bits):
    scheme = Turbo(8, bits)
    keys, values = encoded(rng, scheme, 1, 2, 19, 64)
    _, v = attention.decode_window(to_window(keys, values, scheme), mx.float32, rotated=True)
    wanted = codec.dequantize_values(values, bits=bits, head_dim=64)
    assert np.array(v).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("rotated", [False, True])
def test_a_float16_window_of_huge_elements_is_clamped_to_the_largest_float16(rng, rotated):
    k = np.where(rng.random((1, 1, 8, 64)) < 0.5, -65504, 65504).astype(np.float16)
    keys = codec.encode_keys(k, bits=8, guard=True)
    values = codec.encode_values(k, bits=8, guard=True)
    assert codec.decode_keys(keys, bits=8).max() > 65504
    window = to_window(keys, values, Turbo(8, 8))
    decoded_k, decoded_v = attention.decode_window(window, mx.float16, rotated=rotated)
    assert decoded_k.dtype == decoded_v.dtype == mx.float16
    assert mx.abs(decoded_k).max().item() == 65504
    assert mx.isfinite(decoded_v).all().item()

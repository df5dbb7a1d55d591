"""Attention on MLX arrays equals the definition, on each of its paths."""

from itertools import product

import numpy as np
import pytest

from kvstow.attention import reference
from kvstow.codec import reference as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, Turbo

mx = pytest.importorskip("mlx.core")
attention = pytest.importorskip("kvstow.attention.mlx")
tiled = pytest.importorskip("kvstow.attention.tiled")

pytestmark = pytest.mark.mlx

# Elements are of order 1. Sums of up to 512 products in another order, a softmax whose
# exponents carry that error, and the rotation, whose sums run over other elements.
ATOL = 1e-5
# Half precision rounds queries, weights, the decoded window and the output: 2**-11, 2**-8.
ATOL_OF = {"float16": 2e-3, "bfloat16": 1.5e-2}
WIDTHS = list(product(KEY_BITS, VALUE_BITS))
ON_CPU = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="a GPU has one path by MLX's operations"
)


@pytest.fixture(
    params=["host", pytest.param("products", marks=ON_CPU), pytest.param("tiled", marks=ON_CPU)]
)
def path(request, monkeypatch):
    """Forces one of the paths, whatever there is to attend to."""
    monkeypatch.setattr(attention.codec, "on_gpu", lambda: request.param == "host")
    if request.param == "tiled":
        small_tiles(monkeypatch, tokens=16)


def small_tiles(monkeypatch, *, tokens, scores=256):
    """Blocks of `tokens` tokens, and tiles of so few queries that each has `scores` scores."""
    monkeypatch.setattr(tiled, "BLOCK_ELEMENTS", 0)
    monkeypatch.setattr(tiled, "LEAST_BLOCK", tokens)
    monkeypatch.setattr(tiled, "TILE_SCORES", scores)


on_all_paths = pytest.mark.usefixtures("path")


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


def compare(rng, scheme, shape, mask=None, atol=ATOL, sinks=None, **window):
    b, hq, h, n_queries, t, d = shape
    q = rng.standard_normal((b, hq, n_queries, d)).astype(np.float32)
    keys, values = encoded(rng, scheme, b, h, t, d)
    how = {"scale": d**-0.5, "mask": mask, "sinks": sinks}
    wanted = reference.attend(q, keys, values, scheme=scheme, **how)
    on_mlx = {k: mx.array(x) if isinstance(x, np.ndarray) else x for k, x in how.items()}
    got = attention.attend(mx.array(q), to_window(keys, values, scheme, **window), **on_mlx)
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), wanted, rtol=0, atol=atol)
    assert np.abs(wanted).max() > 100 * atol


@on_all_paths
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


@on_all_paths
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("n_queries", [1, 2, 8, 40])
@pytest.mark.parametrize("heads_per_kv_head", [1, 2, 3, 7])
def test_attention_equals_the_definition_for_every_mask_and_grouping(
    rng, heads_per_kv_head, n_queries, mask
):
    b, h, t = 2, 2, 41
    shape = (b, heads_per_kv_head * h, h, n_queries, t, 64)
    compare(rng, Turbo(), shape, MASKS[mask](rng, b, shape[1], n_queries, t))


@on_all_paths
@pytest.mark.parametrize("mask", ["none", "causal", "bool_b_hq_l_t", "added_b_1_l_t"])
@pytest.mark.parametrize("n_queries", [1, 8, 40])
@pytest.mark.parametrize("heads_per_kv_head", [1, 3])
def test_attention_equals_the_definition_with_sinks(rng, heads_per_kv_head, n_queries, mask):
    b, h, t = 2, 2, 41
    shape = (b, heads_per_kv_head * h, h, n_queries, t, 64)
    sinks = rng.normal(0, 3, shape[1]).astype(np.float32)
    compare(rng, Turbo(), shape, MASKS[mask](rng, b, shape[1], n_queries, t), sinks=sinks)


@on_all_paths
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


@on_all_paths
@pytest.mark.parametrize("fill", GARBAGE)
@pytest.mark.parametrize("n_queries", [1, 3, 40])
def test_what_lies_behind_the_last_token_is_not_seen(rng, fill, n_queries):
    shape = (2, 6, 2, n_queries, 41, 64)
    compare(rng, Turbo(), shape, "causal", capacity=256, fill=GARBAGE[fill])
    compare(rng, Turbo(), shape, None, capacity=256, fill=GARBAGE[fill])


@on_all_paths
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


@ON_CPU
def test_a_window_is_cut_where_its_block_or_the_scores_are_too_large(rng, monkeypatch):
    small_tiles(monkeypatch, tokens=32, scores=32 * 4 * 5)  # 4 query heads, 5 query tokens
    cuts = {(32, 5): 1, (33, 5): 2, (32, 6): 2, (64, 5): 2, (65, 11): 9}
    for (t, n_queries), n_tiles in cuts.items():
        keys, values = encoded(rng, Turbo(), 1, 2, t, 64)
        window = to_window(keys, values, Turbo(), capacity=256)
        assert tiled.n_tiles(mx.zeros((1, 4, n_queries, 64)), window) == n_tiles


@pytest.mark.parametrize(
    ("heads", "block", "queries"),
    [((9, 3, 64), 4096, 28), ((32, 8, 128), 1024, 32), ((64, 16, 512), 256, 64)],
)
def test_the_sizes_that_were_measured(heads, block, queries):
    hq, h, d = heads
    assert (tiled.block_tokens(h, d), tiled.tile_queries(hq, h, d)) == (block, queries)


@ON_CPU
@pytest.mark.parametrize("mask", ["causal", None, "array"])
def test_peak_memory_does_not_grow_with_the_window(rng, monkeypatch, mask):
    small_tiles(monkeypatch, tokens=64, scores=64 * 6 * 16)
    n_queries, d, peaks = 40, 64, []
    for t in (1024, 8192):
        window = to_window(*encoded(rng, Turbo(), 1, 2, t, d), Turbo())
        queries = mx.array(rng.standard_normal((1, 6, n_queries, d)).astype(np.float32))
        seen = mx.array(rng.random((n_queries, t)) < 0.5) if mask == "array" else mask
        mx.eval(window.keys, window.values, queries, seen)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(attention.attend(queries, window, scale=d**-0.5, mask=seen))
        peaks.append(mx.get_peak_memory() - before)
    decoded = 2 * 2 * 8192 * d * 4
    assert peaks[1] < 1.2 * peaks[0] < decoded / 4


@ON_CPU
def test_tiles_of_a_row_are_those_it_has_alone(rng, monkeypatch):
    """So a batch of rows of equal length gives each the bytes that it has alone."""
    small_tiles(monkeypatch, tokens=32)
    keys, values = encoded(rng, Turbo(), 3, 2, 100, 64)
    q = mx.array(rng.standard_normal((3, 6, 9, 64)).astype(np.float32))
    together = attention.attend(q, to_window(keys, values, Turbo()), scale=0.125, mask="causal")
    for i in range(3):
        row = [type(part)(*(plane[i : i + 1] for plane in part)) for part in (keys, values)]
        alone = to_window(*row, Turbo(), capacity=128)
        got = attention.attend(q[i : i + 1], alone, scale=0.125, mask="causal")
        assert mx.array_equal(got[0], together[i])


@ON_CPU
def test_a_query_that_sees_nothing_at_first_is_not_disturbed(rng, monkeypatch):
    small_tiles(monkeypatch, tokens=16)
    seen = np.zeros((40, 50), bool)
    seen[np.arange(40), rng.integers(17, 50, 40)] = True  # one token each, in a later block
    for mask in (seen, np.where(seen, 0, -np.inf).astype(np.float32)):
        compare(rng, Turbo(), (1, 6, 2, 40, 50, 64), mask)


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

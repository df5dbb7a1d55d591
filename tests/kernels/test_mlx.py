"""Kernels through MLX on a GPU, against the definition."""

import numpy as np
import pytest

from kvstow.codec import reference
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.kernels import prefill
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, Turbo

mx = pytest.importorskip("mlx.core")
kernels = pytest.importorskip("kvstow.kernels.backend")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mlx,
    pytest.mark.skipif(not kernels.name(), reason="needs mlx with a GPU"),
]
PAIRS = [(k, v) for k in KEY_BITS for v in VALUE_BITS]
FLOATS = ["float32", "float16", "bfloat16"]
# Norm of the error over norm of the output. Queries become integers of 14 bits, weights and
# centroids float16; the output is rounded to the dtype of the queries.
TOLERANCE = {"float32": 1e-3, "float16": 1.2e-3, "bfloat16": 4e-3}
STARTS, LENGTHS = [0, 3, 37, 0, 290], [0, 4, 219, 384, 331]
CAPACITY = 384


def make_planes(rng, head_dim, scheme, *, n_kv_heads=2):
    """Planes that are noise outside the rows, and what the reference decodes, in float64."""
    shape = (len(LENGTHS), n_kv_heads, CAPACITY, head_dim)
    x = (rng.standard_normal(shape) + rng.standard_normal(head_dim)).astype(np.float32)
    y = rng.standard_normal(shape).astype(np.float32)
    keys = reference.encode_keys(x, bits=scheme.key_bits, guard=True)
    values = reference.encode_values(y, bits=scheme.value_bits, guard=True)
    decoded = (
        reference.decode_keys(keys, bits=scheme.key_bits).astype(np.float64),
        reference.decode_values(values, bits=scheme.value_bits, head_dim=head_dim).astype(float),
    )
    at = np.arange(CAPACITY)
    inside = (at >= np.array(STARTS)[:, None]) & (at < np.array(LENGTHS)[:, None])
    inside = inside[:, None, :, None]

    def poisoned(plane):
        noise = rng.integers(-128, 128, plane.shape).astype(plane.dtype)
        if plane.dtype == np.float16:
            noise = np.full_like(plane, np.nan)
        return mx.array(np.where(inside, plane, noise))

    planes = type(keys)(*map(poisoned, keys)), type(values)(*map(poisoned, values))
    return planes, decoded


def attention(queries, keys, values, window=0, sinks=None):
    """Attention in float64, row by row; a query that sees nothing gives zeros."""
    b, hq, n, d = queries.shape
    output = np.zeros((b, hq, n, d))
    for i, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        for j in range(n):
            high = length - n + 1 + j
            low = max(start, high - window) if window else start
            if low >= high:
                continue
            for head in range(hq):
                kv = head * keys.shape[1] // hq
                scores = keys[i, kv, low:high] @ queries[i, head, j] * d**-0.5
                weights = np.exp(scores - scores.max())
                total = weights.sum()
                if sinks is not None:
                    total += np.exp(sinks[head] - scores.max())
                output[i, head, j] = weights @ values[i, kv, low:high] / total
    return output


def made_queries(rng, shape, dtype):
    array = mx.array(2 * rng.standard_normal(shape).astype(np.float32)).astype(getattr(mx, dtype))
    return array, np.array(array.astype(mx.float32)).astype(np.float64)


def rows():
    return kernels.Rows(mx.array(STARTS), mx.array(LENGTHS), max(LENGTHS))


def check(rng, head_dim, scheme, dtype, *, step, window=0):
    """Compare one call; `step` is query heads of a KV head and query tokens."""
    group, n_queries = step
    planes, decoded = make_planes(rng, head_dim, scheme)
    shape = (len(LENGTHS), 2 * group, n_queries, head_dim)
    queries, exact = made_queries(rng, shape, dtype)
    scores = kernels.Scores(head_dim**-0.5, window)
    got = kernels.attend(queries, planes, rows(), scheme, scores)
    assert got.dtype == queries.dtype
    want = attention(exact, *decoded, window)
    off = np.array(got.astype(mx.float32)) - want
    assert np.isfinite(off).all()
    assert np.linalg.norm(off) <= TOLERANCE[dtype] * np.linalg.norm(want)
    assert not np.array(got.astype(mx.float32))[0].any()  # the empty row


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_attention_equals_the_definition_for_every_width(rng, pair, head_dim):
    dtype = FLOATS[sum(pair) % 3]
    check(rng, head_dim, Turbo(*pair), dtype, step=(3, 1))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", [(1, 1), (1, 8), (2, 5), (5, 1), (7, 3), (8, 1), (15, 1), (16, 8)])
def test_query_tokens_of_a_step_see_only_the_past(rng, head_dim, dtype, step):
    check(rng, head_dim, Turbo(8, 3), dtype, step=step)


ON_CUDA = pytest.mark.skipif(kernels.name() != "cuda", reason="no other kernels are for prompts")


@ON_CUDA
@pytest.mark.parametrize("head_dim", prefill.HEAD_DIMS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_prompt_equals_the_definition_for_every_width(rng, pair, head_dim):
    check(rng, head_dim, Turbo(*pair), FLOATS[sum(pair) % 3], step=(3, 61))


@ON_CUDA
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", [(1, 9), (4, 130), (5, 32), (16, 300)])
def test_query_tokens_of_a_prompt_see_only_the_past_and_a_window(rng, dtype, step, window):
    check(rng, 128, Turbo(8, 3), dtype, step=step, window=window)


@pytest.mark.parametrize("window", [1, 16, 37, 300, 4000])
@pytest.mark.parametrize("n_queries", [1, 4])
def test_a_window_hides_older_tokens(rng, window, n_queries):
    check(rng, 128, Turbo(8, 3), "float32", step=(4, n_queries), window=window)


@pytest.mark.parametrize("n_tokens", [1, 31, 257, 384])
def test_equal_rows_need_no_arrays(rng, n_tokens):
    scheme = Turbo(8, 3)
    x, y = rng.standard_normal((2, 1, 2, 384, 64)).astype(np.float32)
    keys = reference.encode_keys(x, bits=8, guard=True)
    values = reference.encode_values(y, bits=3, guard=True)
    planes = type(keys)(*map(mx.array, keys)), type(values)(*map(mx.array, values))
    queries, exact = made_queries(rng, (1, 4, 1, 64), "float32")
    got = kernels.attend(queries, planes, n_tokens, scheme, kernels.Scores(0.125))
    k = reference.decode_keys(keys, bits=8)[:, :, :n_tokens].repeat(2, 1)
    v = reference.decode_values(values, bits=3, head_dim=64)[:, :, :n_tokens].repeat(2, 1)
    scores = np.einsum("bhqd,bhtd->bhqt", exact, k) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights @ v / weights.sum(-1, keepdims=True)
    assert np.linalg.norm(np.array(got) - want) <= 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("n_queries", [1, 3])
def test_a_sink_takes_weight_and_has_no_value(rng, n_queries):
    planes, decoded = make_planes(rng, 64, Turbo(8, 3))
    queries, exact = made_queries(rng, (len(LENGTHS), 6, n_queries, 64), "float32")
    sinks = rng.standard_normal(6) * 3
    scores = kernels.Scores(0.125, sinks=mx.array(sinks.astype(np.float32)))
    got = kernels.attend(queries, planes, rows(), Turbo(8, 3), scores)
    want = attention(exact, *decoded, sinks=sinks)
    assert np.linalg.norm(np.array(got) - want) <= 1e-3 * np.linalg.norm(want)


def test_rows_longer_than_they_claim_are_cut_and_too_many_tokens_refused(rng):
    planes, _ = make_planes(rng, 64, Turbo(8, 3))
    queries, _ = made_queries(rng, (len(LENGTHS), 2, 1, 64), "float32")
    claimed = kernels.Rows(mx.array([0] * 5), mx.array([10**6] * 5), 100)
    cut = kernels.attend(queries, planes, claimed, Turbo(8, 3), kernels.Scores(0.125))
    short = kernels.attend(queries, planes, 100, Turbo(8, 3), kernels.Scores(0.125))
    assert mx.array_equal(cut, short, equal_nan=True)
    with pytest.raises(ValueError, match="385 tokens do not fit in a capacity of 384"):
        kernels.attend(queries, planes, 385, Turbo(8, 3), kernels.Scores(0.125))


def test_many_calls_at_once_do_not_disturb_each_other(rng):
    planes, _ = make_planes(rng, 128, Turbo(8, 3))
    queries, _ = made_queries(rng, (5, 8, 1, 128), "bfloat16")
    scores = kernels.Scores(0.1)
    calls = [kernels.attend(queries, planes, rows(), Turbo(8, 3), scores) for _ in range(600)]
    mx.eval(calls)
    assert all(mx.array_equal(call, calls[0]) for call in calls[1:])


def appended(given, planes, at, exact, after):
    """By a launch of its own, and then attended to."""
    queries, scheme, scores = given
    written = kernels.append(planes, at, exact, scheme, after=after)
    pair = PackedKeys(*planes[:3]), PackedValues(*planes[3:])
    seen = at + exact[0].shape[2]
    return kernels.attend(queries, pair, seen, scheme, scores, after=written), written


def appended_as_attended(given, planes, at, exact, after):
    queries, scheme, scores = given
    pair = PackedKeys(*planes[:3]), PackedValues(*planes[3:])
    call = kernels.planned(queries, pair, at + 1, scheme, scores, stores=at)
    output = call(queries, pair, exact, after)
    return output, output


@pytest.mark.skipif(not kernels.can_append(), reason="only CUDA's kernels append")
@pytest.mark.parametrize(
    ("step", "append"), [(1, appended), (3, appended), (1, appended_as_attended)]
)
def test_attention_sees_what_was_appended_in_its_own_graph(rng, step, append):
    """Nothing is computed before the end, so all launches are in one graph of MLX's."""
    scheme, n, start = Turbo(8, 3), 30, 5
    x, y = (mx.array(rng.standard_normal((2, 2, n, 64)).astype(np.float32)) for _ in "kv")
    queries, _ = made_queries(rng, (2, 4, 1, 64), "float32")
    whole = [mx.contiguous(p) for part in kernels.encode(x, y, scheme) for p in part]
    planes = [
        mx.contiguous(mx.pad(p[:, :, :start], [(0, 0), (0, 0), (0, 51), (0, 0)])) for p in whole
    ]
    mx.eval(planes, whole)
    made, written, scores = [], None, kernels.Scores(0.125)
    for at in range(start, n, step):
        exact = x[:, :, at : at + step], y[:, :, at : at + step]
        output, written = append((queries, scheme, scores), planes, at, exact, written)
        made.append((min(at + step, n), output))
    mx.eval([output for _, output in made])
    for plane, wanted in zip(planes, whole, strict=True):
        assert mx.array_equal(plane[:, :, :n], wanted, equal_nan=True)
        assert not plane[:, :, n:].any()
    padded = [mx.pad(p, [(0, 0), (0, 0), (0, 2), (0, 0)]) for p in whole]
    pair = PackedKeys(*padded[:3]), PackedValues(*padded[3:])
    for seen, output in made:
        assert mx.array_equal(output, kernels.attend(queries, pair, seen, scheme, scores))


def vectors(rng, head_dim, n=4096):
    """Ordinary vectors, and with outliers, offsets, constants, zeros, tiny and huge elements."""
    x = rng.standard_normal((n, head_dim)) * np.exp(2 * rng.standard_normal((n, 1)))
    eighth = n // 8
    x[:eighth] += 20 * rng.standard_normal((eighth, 1))
    x[eighth : eighth + 50] = rng.standard_normal((50, 1))
    x[eighth + 50 : eighth + 60] = 0
    x[2 * eighth : 3 * eighth] *= 10.0 ** rng.uniform(-9, 9, (eighth, 1))
    x[3 * eighth : 3 * eighth + 9] *= 1e25
    x[3 * eighth + 10, 3], x[3 * eighth + 11, 5] = np.nan, np.inf
    x[:, rng.integers(0, head_dim, 3)] *= 15
    return x.astype(np.float32).reshape(2, 4, n // 8, head_dim)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pair", [(8, 2), (5, 3), (4, 4), (2, 5), (8, 8)], ids=str)
@pytest.mark.parametrize("search", [False, True])
def test_encoded_bytes_are_those_of_the_definition(rng, head_dim, dtype, pair, search):
    with np.errstate(over="ignore"):
        keys = mx.array(vectors(rng, head_dim)).astype(getattr(mx, dtype))
    values = mx.array(np.roll(np.array(keys.astype(mx.float32)), 1, 2)).astype(keys.dtype)
    got = kernels.encode(keys, values, Turbo(*pair, search=search))
    k, v = (np.array(x.astype(mx.float32)) for x in (keys, values))
    want_keys = reference.encode_keys(k, bits=pair[0], guard=True, search=search)
    want_values = reference.encode_values(v, bits=pair[1], guard=True, search=search)
    for mine, want in zip((*got[0], *got[1]), (*want_keys, *want_values), strict=True):
        np.testing.assert_array_equal(np.array(mine), want)

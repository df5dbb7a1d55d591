"""The device source, run on the CPU lane by lane, against the definition."""

import numpy as np
import pytest

from kvstow.codec import reference
from kvstow.codec.tables import BOUNDARIES
from kvstow.kernels.plan import Device, plan_prefill
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS
from tests.kernels import emulated

pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="needs a g++ that knows float16, and ucontext"
)
STARTS, LENGTHS, CAPACITY = [0, 3, 37, 0], [0, 4, 119, 128], 128
# Queries are integers of 14 bits or float16, weights and centroids float16; in bfloat16 queries are
# rounded too, which moves scores, and what the output is rounded to.
TOLERANCE = {"float32": 1e-3, "float16": 1.2e-3, "bfloat16": 1.2e-2}
LARGE = Device(90, 1)  # has room for two row tiles of each of eight warps


def make_planes(rng, head_dim, widths, growth=0):
    """Planes that are NaN and noise outside the rows, and what they decode to inside.

    The mean of keys grows from the first token to the last.
    """
    shape = len(LENGTHS), 2, CAPACITY, head_dim
    x, y = rng.standard_normal((2, *shape)).astype(np.float32)
    mean = 1 + growth * np.linspace(0, 1, CAPACITY, dtype=np.float32)[:, None]
    keys = reference.encode_keys(x + mean, bits=widths[0], guard=True)
    values = reference.encode_values(y, bits=widths[1], guard=True)
    decoded = (
        reference.decode_keys(keys, bits=widths[0]).astype(np.float64),
        reference.decode_values(values, bits=widths[1], head_dim=head_dim).astype(np.float64),
    )
    at = np.arange(CAPACITY)
    inside = (at >= np.array(STARTS)[:, None]) & (at < np.array(LENGTHS)[:, None])
    planes = []
    for plane in (*keys, *values):
        noise = rng.integers(-128, 128, plane.shape).astype(plane.dtype)
        if plane.dtype == np.float16:
            noise = np.full_like(plane, np.nan)
        planes.append(np.where(inside[:, None, :, None], plane, noise))
    return planes, decoded


def attention(queries, keys, values, window=0, sinks=None):
    """Attention in float64; a query that sees nothing gives zeros."""
    b, hq, n, d = queries.shape
    output = np.zeros(queries.shape)
    for i, head, j in np.ndindex(b, hq, n):
        high = LENGTHS[i] - n + 1 + j
        low = max(STARTS[i], high - window) if window else STARTS[i]
        if low >= high:
            continue
        kv = head * keys.shape[1] // hq
        scores = keys[i, kv, low:high] @ queries[i, head, j].astype(np.float64) * d**-0.5
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
        output[i, head, j] = weights @ values[i, kv, low:high] / total
    return output


def check(rng, folder, widths, shape, **options):
    """Compare one call; `shape` is head_dim, query heads of a KV head and query tokens."""
    head_dim, group, n_queries = shape
    planes, decoded = make_planes(rng, head_dim, widths)
    queries = rng.standard_normal((len(LENGTHS), 2 * group, n_queries, head_dim))
    queries = (2 * queries).astype(np.float32)
    rows = {"starts": np.array(STARTS, np.int32), "lengths": np.array(LENGTHS, np.int32)}
    got = emulated.attend(queries, planes, widths, folder, **rows, **options)
    dtype = options.get("dtype", "float32")
    for of_launch in ("chunk", "shares", "plan", "device", "dtype"):
        options.pop(of_launch, None)
    want = attention(queries, *decoded, **options)
    assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
    assert not got[0].any()  # the empty row


def hard_vectors(rng, head_dim):
    """Of every size, constants, zeros, offsets, huge ones, NaN and infinity: ``(2, 3, 20, d)``."""
    x = rng.standard_normal((2, 3, 20, head_dim)) * 10.0 ** rng.uniform(-9, 9, (2, 3, 20, 1))
    x[0, 0, :2], x[0, 0, 2] = 1e-3, 0
    x[0, 1] += 1e3
    x[0, 2, :4] *= 1e25
    x[1, 0, 5, 3], x[1, 0, 6, 2] = np.nan, np.inf
    return x.astype(np.float32)


@pytest.mark.parametrize("value_bits", VALUE_BITS)
@pytest.mark.parametrize("key_bits", KEY_BITS)
def test_attention_equals_the_definition_for_every_width(rng, programs, key_bits, value_bits):
    check(rng, programs, (key_bits, value_bits), (64, 3, 1))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("widths", [(8, 3), (2, 8)])
def test_splits_are_merged_for_every_head_dim(rng, programs, head_dim, widths):
    check(rng, programs, widths, (head_dim, 1, 1), chunk=64)


@pytest.mark.parametrize("shares", [1, 3, 40])
def test_blocks_take_shares_of_rows_that_differ_in_length(rng, programs, shares):
    check(rng, programs, (8, 3), (64, 33, 1), chunk=32, shares=shares, window=100)


@pytest.mark.parametrize(("n_queries", "window"), [(1, 0), (3, 40)])
def test_rows_of_one_length_are_cut_into_splits_by_the_grid(rng, programs, n_queries, window):
    planes, decoded = make_planes(rng, 64, (8, 3))
    queries = rng.standard_normal((len(LENGTHS), 6, n_queries, 64)).astype(np.float32)
    want = attention(queries, *decoded, window)[3:]  # the row that fills its planes
    whole = [np.ascontiguousarray(plane[3:]) for plane in planes]
    got = emulated.attend(queries[3:], whole, (8, 3), programs, chunk=32, window=window)
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [128, 256])  # rows are finished out of shared memory, or not
def test_a_block_that_has_all_of_its_rows_writes_them(rng, programs, head_dim, dtype):
    planes, decoded = make_planes(rng, head_dim, (8, 3))
    queries = rng.standard_normal((len(LENGTHS), 6, 1, head_dim)).astype(np.float32)
    sinks = rng.standard_normal(6).astype(np.float32)
    want = attention(queries, *decoded, sinks=sinks)[3:]  # the row that fills its planes
    whole = [np.ascontiguousarray(plane[3:]) for plane in planes]
    got = emulated.attend(queries[3:], whole, (8, 3), programs, sinks=sinks, dtype=dtype)
    assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("growth", [0, 8000])  # of scores times the root of 64, from first to last
@pytest.mark.parametrize("n_splits", [20, 40])  # more than are loaded at once; than lanes
def test_any_number_of_splits_is_merged(rng, programs, n_splits, growth):
    n = 32 * n_splits
    x, y = rng.standard_normal((2, 1, 1, n, 64)).astype(np.float32)
    queries = rng.standard_normal((1, 1, 1, 64)).astype(np.float32)
    rise = np.linspace(0, growth, n, dtype=np.float32)[:, None]
    keys = reference.encode_keys(x + rise * queries / (queries**2).sum(), bits=8, guard=True)
    values = reference.encode_values(y, bits=3, guard=True)
    decoded_keys = reference.decode_keys(keys, bits=8).astype(np.float64)[0, 0]
    decoded_values = reference.decode_values(values, bits=3, head_dim=64)[0, 0]
    scores = decoded_keys @ queries[0, 0, 0] / 8
    weights = np.exp(scores - scores.max())
    want = weights @ decoded_values / weights.sum()
    got = emulated.attend(queries, [*keys, *values], (8, 3), programs, chunk=32)[0, 0, 0]
    assert np.linalg.norm(got - want) <= 3e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(("group", "shares"), [(2, 1), (33, 1), (2, 5)])
def test_a_lost_query_leaves_the_rows_that_its_block_takes_next_as_they_are(
    rng, programs, group, shares
):
    planes, decoded = make_planes(rng, 64, (8, 3))
    queries = rng.standard_normal((len(LENGTHS), 2 * group, 1, 64)).astype(np.float32)
    want = attention(queries, *decoded)
    queries[2, 0, 0, 3] = np.nan
    rows = {"starts": np.array(STARTS, np.int32), "lengths": np.array(LENGTHS, np.int32)}
    got = emulated.attend(queries, planes, (8, 3), programs, chunk=32, shares=shares, **rows)
    lost = np.isnan(got)
    assert lost[2, 0].all()
    assert lost.sum() == 64
    assert np.linalg.norm((got - want)[~lost]) <= 1e-3 * np.linalg.norm(want[~lost])


def test_more_rows_than_a_warp_has_lanes_are_found(rng, programs):
    planes, decoded = make_planes(rng, 64, (4, 2))
    queries = rng.standard_normal((len(LENGTHS), 2, 1, 64)).astype(np.float32)
    want = np.tile(attention(queries, *decoded), (9, 1, 1, 1))
    many = [np.tile(plane, (9, 1, 1, 1)) for plane in planes]
    rows = {"starts": np.tile(np.array(STARTS, np.int32), 9)}
    rows["lengths"] = np.tile(np.array(LENGTHS, np.int32), 9)
    queries = np.tile(queries, (9, 1, 1, 1))
    got = emulated.attend(queries, many, (4, 2), programs, chunk=32, shares=7, **rows)
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    assert not got[:: len(LENGTHS)].any()  # the empty rows


@pytest.mark.parametrize("step", [(1, 5), (7, 3), (33, 1), (5, 13)])
def test_query_tokens_see_only_the_past_and_a_window(rng, programs, step):
    check(rng, programs, (5, 4), (64, *step), chunk=32, window=19)


@pytest.mark.parametrize(
    ("head_dim", "widths", "group", "options"),
    [
        (64, (8, 3), 4, {"shares": 1}),
        (128, (8, 3), 3, {"shares": 40, "window": 40}),
        (128, (2, 5), 40, {"shares": 7}),  # more query rows than a block takes
        (256, (4, 8), 1, {}),
        (512, (5, 4), 2, {"chunk": 32}),
        (64, (8, 3), 4, {"stored": 70}),
        (128, (8, 3), 20, {"stored": 60, "shares": 9}),
        (256, (4, 3), 3, {"stored": 2}),
    ],
)
def test_a_token_of_each_row_is_stored_before_it_is_read(
    rng, programs, head_dim, widths, group, options
):
    """The last one, or one anywhere, as in a window that slides."""
    planes, _ = make_planes(rng, head_dim, widths)
    at = options.get("stored")
    exact = [hard_rows(rng, head_dim) for _ in "kv"]
    stored = (
        *reference.encode_keys(exact[0], bits=widths[0], guard=True),
        *reference.encode_values(exact[1], bits=widths[1], guard=True),
    )
    wanted = [plane.copy() for plane in planes]
    for i, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        place = length - 1 if at is None else at
        for plane, token in zip(wanted, stored, strict=True) if start <= place < length else ():
            plane[i, :, place] = token[i, :, 0]
    rows = {"starts": np.array(STARTS, np.int32), "lengths": np.array(LENGTHS, np.int32)}
    queries = rng.standard_normal((len(LENGTHS), 2 * group, 1, head_dim)).astype(np.float32)
    got = emulated.attend(queries, planes, widths, programs, exact=exact, **rows, **options)
    for plane, expected in zip(planes, wanted, strict=True):
        np.testing.assert_array_equal(plane, expected)
    again = emulated.attend(queries, wanted, widths, programs, **rows, **options)
    np.testing.assert_array_equal(got, again)
    assert np.isfinite(got[1:]).all()


def hard_rows(rng, head_dim):
    """A token of each row: ordinary, with an outlier, tiny, and one whose groups are guarded."""
    x = rng.standard_normal((len(LENGTHS), 2, 1, head_dim))
    x[1, :, :, 3] *= 30
    x[2] *= 1e-7
    x[3, 0] = 5.0
    return x.astype(np.float32)


@pytest.mark.parametrize("n_queries", [1, 3])
def test_a_sink_takes_weight_and_has_no_value(rng, programs, n_queries):
    sinks = (3 * rng.standard_normal(6)).astype(np.float32)
    check(rng, programs, (8, 3), (64, 3, n_queries), chunk=64, sinks=sinks)


@pytest.mark.parametrize(
    ("widths", "shape"),
    [
        ((8, 2), (64, 3, 30)),  # query rows of two blocks, the second one cut
        ((2, 4), (128, 5, 13)),
        ((4, 8), (64, 1, 9)),
        ((5, 5), (256, 2, 9)),
        ((8, 3), (128, 1, 130)),  # more queries than some rows have tokens
    ],
)
def test_a_prompt_sees_what_the_definition_says_at_every_width(rng, programs, widths, shape):
    check(rng, programs, widths, shape, plan=plan_prefill)


@pytest.mark.parametrize(("head_dim", "chunk"), [(64, 128), (128, 64), (256, 32)])
def test_blocks_of_eight_warps_and_splits_are_merged(rng, programs, head_dim, chunk):
    options = {"plan": plan_prefill, "device": Device(90, 1), "chunk": chunk}
    check(rng, programs, (8, 3), (head_dim, 2, 65), **options)


@pytest.mark.parametrize(
    ("head_dim", "widths", "step", "options"),
    [
        (64, (4, 5), (3, 61), {"dtype": "float16"}),  # a block cut within a row tile
        (128, (8, 3), (3, 61), {"dtype": "bfloat16", "window": 19}),
        (128, (8, 3), (2, 130), {"chunk": 64}),  # two blocks, and rows beyond a start or a length
        (128, (5, 2), (1, 129), {"chunk": 64, "window": 50}),  # one row more than one row tile has
        (128, (2, 8), (5, 27), {"dtype": "float16"}),
        (64, (8, 3), (8, 33), {"dtype": "bfloat16", "chunk": 128, "window": 5}),
    ],
)
def test_a_warp_attends_with_two_row_tiles(rng, programs, head_dim, widths, step, options):
    sinks = (3 * rng.standard_normal(2 * step[0])).astype(np.float32)
    given = {"plan": plan_prefill, "device": LARGE, "sinks": sinks, **options}
    check(rng, programs, widths, (head_dim, *step), **given)


@pytest.mark.parametrize("n_queries", [20, 140])  # one row tile, and two
def test_scores_of_a_prompt_may_grow_from_tile_to_tile(rng, programs, n_queries):
    planes, (keys, values) = make_planes(rng, 128, (8, 3), growth=4)
    queries = 2 * rng.standard_normal((len(LENGTHS), 2, n_queries, 128)).astype(np.float32)
    rows = {"starts": np.array(STARTS, np.int32), "lengths": np.array(LENGTHS, np.int32)}
    options = {"plan": plan_prefill, "device": LARGE, **rows}
    got = emulated.attend(queries, planes, (8, 3), programs, **options)
    want = attention(queries, keys, values)
    # Keys of 4 in float16 are 1e-3 off, and so are scores.
    assert np.linalg.norm(got - want) <= 3e-3 * np.linalg.norm(want)


def test_a_query_that_is_not_finite_makes_no_other_row_so(rng, programs):
    planes, _ = make_planes(rng, 64, (8, 3))
    queries = rng.standard_normal((len(LENGTHS), 2, 140, 64)).astype(np.float32)
    queries[3, 0, 17, 3], queries[3, 1, 100, 5] = np.nan, np.inf
    rows = {"starts": np.array(STARTS, np.int32), "lengths": np.array(LENGTHS, np.int32)}
    options = {"plan": plan_prefill, "device": LARGE, **rows}
    lost = ~np.isfinite(emulated.attend(queries, planes, (8, 3), programs, **options)).all(-1)
    assert lost[3, 0, 17] == (LENGTHS[3] - 140 + 17 >= 0)
    assert lost[3, 1, 100]
    assert lost.sum() == 1 + lost[3, 0, 17]


@pytest.mark.parametrize("chunk", [32, 128])
def test_a_prompt_sees_a_window_and_a_sink(rng, programs, chunk):
    sinks = (3 * rng.standard_normal(6)).astype(np.float32)
    options = {"plan": plan_prefill, "chunk": chunk, "window": 19, "sinks": sinks}
    check(rng, programs, (4, 3), (128, 3, 20), **options)


def test_keys_beyond_float16_saturate_in_a_prompt(rng, programs):
    keys = np.full((1, 1, 32, 64), 5e4, np.float32)
    keys[..., ::2] = -5e4
    keys[0, 0, 7] *= 3
    values = rng.standard_normal(keys.shape).astype(np.float32)
    planes = (
        *reference.encode_keys(keys, bits=8, guard=True),
        *reference.encode_values(values, bits=3, guard=True),
    )
    queries = np.zeros((1, 1, 9, 64), np.float32)
    queries[..., 1] = 1e-4
    got = emulated.attend(queries, list(planes), (8, 3), programs, plan=plan_prefill)
    assert np.isfinite(got).all()


@pytest.mark.parametrize(
    ("head_dim", "widths", "search"),
    [(64, (8, 3), False), (128, (8, 5), True), (512, (5, 2), False), (256, (4, 8), True)],
)
def test_encoded_bytes_are_those_of_the_definition(rng, programs, head_dim, widths, search):
    keys = hard_vectors(rng, head_dim)
    values = np.ascontiguousarray(keys[::-1])
    planes = emulated.encode(keys, values, widths, programs, search=search, position=5)
    want = (
        *reference.encode_keys(keys, bits=widths[0], guard=True, search=search),
        *reference.encode_values(values, bits=widths[1], guard=True, search=search),
    )
    for got, expected in zip(planes, want, strict=True):
        np.testing.assert_array_equal(got[:, :, 5:25], expected)
        assert (got[:, :, :5] == 77).all()
        assert (got[:, :, 25:] == 77).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_elements_of_16_bits_are_encoded_as_their_float32(rng, programs, dtype):
    x = hard_vectors(rng, 128)
    narrow = emulated.narrowed(x, dtype)
    bits = narrow.view(np.uint16).astype(np.uint32)
    wide = (bits << 16).view(np.float32) if dtype == "bfloat16" else narrow.astype(np.float32)
    planes = emulated.encode(narrow, narrow[::-1].copy(), (8, 3), programs, dtype=dtype)
    want = (
        *reference.encode_keys(wide, bits=8, guard=True),
        *reference.encode_values(wide[::-1], bits=3, guard=True),
    )
    for got, expected in zip(planes, want, strict=True):
        np.testing.assert_array_equal(got[:, :, :20], expected)


def test_of_many_blocks_one_encodes_each_key_and_one_each_value(rng, programs):
    keys, values = rng.standard_normal((2, 2, 3, 170, 512)).astype(np.float32)
    planes = emulated.encode(
        keys, values, (8, 3), programs
    )  # 128 blocks for either, the last one cut
    want = (
        *reference.encode_keys(keys, bits=8, guard=True),
        *reference.encode_values(values, bits=3, guard=True),
    )
    for got, expected in zip(planes, want, strict=True):
        np.testing.assert_array_equal(got[:, :, :170], expected)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("divisor", [1e-8, 0.3, 1.0, 1.5, 777.7, 2.0**60, 1e29])
def test_no_number_is_on_the_other_side_of_a_boundary_times_the_divisor(
    rng, programs, bits, divisor
):
    divisor = np.float32(divisor)
    near = np.append(BOUNDARIES[bits] * divisor, np.float32([0, 2.0**-149, 1e-40])).astype(
        np.float32
    )
    steps = near.view(np.int32)[:, None] + np.arange(-40, 41)
    smallest = np.arange(1, 40, dtype=np.int32).view(np.float32) * np.float32([[1], [-1]])
    ties = divisor * np.float32(2.0**-149) * np.arange(-4, 5, dtype=np.float32) / 2
    normal = 2 * divisor * rng.standard_normal(10_000).astype(np.float32)
    special = np.float32([np.inf, -np.inf, np.nan, 0, -0.0])
    x = [steps.astype(np.int32).view(np.float32), smallest, ties, normal, special]
    x = np.ascontiguousarray(np.concatenate([a.ravel() for a in x]), np.float32)
    multiplied, divided = emulated.codes_of(x, divisor, bits, programs)
    np.testing.assert_array_equal(multiplied, divided)
    assert len(set(multiplied)) == 1 << bits

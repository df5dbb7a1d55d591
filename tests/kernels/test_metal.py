"""Metal kernels, run on the CPU lane by lane in the text that MLX makes, against the definition."""

import numpy as np
import pytest

from kvstow.codec import reference
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, Turbo
from tests.kernels import test_emulated as definition

mx = pytest.importorskip("mlx.core")
metal_on_cpu = pytest.importorskip("tests.kernels.metal_on_cpu")
kernels = pytest.importorskip("kvstow.kernels.metal_mlx")
plans = pytest.importorskip("kvstow.kernels.metal_plan")
selfcheck = pytest.importorskip("kvstow.attention.selfcheck")
parity = pytest.importorskip("kvstow.evaluate.parity")
stand_in = pytest.importorskip("tests.kernels.stand_in")

pytestmark = pytest.mark.mlx
metal, metal_folder = metal_on_cpu.metal, metal_on_cpu.metal_folder
STARTS, LENGTHS, CAPACITY = definition.STARTS, definition.LENGTHS, definition.CAPACITY
PAIRS = [(k, v) for k in KEY_BITS for v in VALUE_BITS]
FLOATS = ("float32", "float16", "bfloat16")
# Norm of the error over norm of the output: nothing but float32, and the output's own rounding.
TOLERANCE = {"float32": 3e-6, "float16": 5e-4, "bfloat16": 4e-3}


def check(rng, metal, widths, shape, dtype="float32", **options):
    """Compare one call; `shape` is head_dim, query heads of a KV head and query tokens.

    Options: window, sinks.
    """
    head_dim, group, n_queries = shape
    sinks = options.get("sinks")
    planes, decoded = definition.make_planes(rng, head_dim, widths)
    at = np.arange(CAPACITY)
    inside = (at >= np.array(STARTS)[:, None]) & (at < np.array(LENGTHS)[:, None])
    metal.readable = dict.fromkeys(kernels._PLANES, inside[:, None, :, None])
    queries = 2 * rng.standard_normal((len(LENGTHS), 2 * group, n_queries, head_dim))
    queries = mx.array(queries.astype(np.float32)).astype(getattr(mx, dtype))
    packed = PackedKeys(*map(mx.array, planes[:3])), PackedValues(*map(mx.array, planes[3:]))
    rows = kernels.Rows(mx.array(STARTS), mx.array(LENGTHS), max(LENGTHS))
    given = None if sinks is None else mx.array(sinks)
    scores = kernels.Scores(head_dim**-0.5, options.get("window", 0), given)
    output = kernels.attend(queries, packed, rows, Turbo(*widths), scores)
    assert output.dtype == queries.dtype
    got, exact = (np.array(x.astype(mx.float32)) for x in (output, queries))
    want = definition.attention(exact, *decoded, **options)
    assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
    assert not got[0].any()  # the empty row


@pytest.fixture
def small_splits(monkeypatch):
    monkeypatch.setattr(plans, "LEAST_CHUNK", 21)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_attention_equals_the_definition_for_every_width(rng, metal, pair):
    i = PAIRS.index(pair)
    check(rng, metal, pair, (HEAD_DIMS[i % 2], 3, 1), dtype=FLOATS[i % 3])


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("widths", [(8, 3), (5, 8), (4, 5)])
def test_splits_are_merged_for_every_head_dim(rng, metal, head_dim, widths):
    check(rng, metal, widths, (head_dim, 1, 1))
    assert metal[0]["output_shapes"][0][1] == 7  # splits, in two threadgroups


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("step", [(1, 5), (7, 3), (33, 1), (2, 8)])
def test_query_tokens_see_only_the_past_and_a_window(rng, metal, step):
    check(rng, metal, (5, 4), (64, *step), window=19)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("n_queries", [1, 3])
def test_a_sink_takes_weight_and_has_no_value(rng, metal, n_queries):
    sinks = (3 * rng.standard_normal(6)).astype(np.float32)
    check(rng, metal, (8, 3), (64, 3, n_queries), sinks=sinks)


@pytest.mark.parametrize("n_tokens", [1, 2, 31, 128])
def test_equal_rows_need_no_arrays(rng, metal, n_tokens):
    x, y = rng.standard_normal((2, 1, 1, CAPACITY, 64)).astype(np.float32)
    keys = reference.encode_keys(x, bits=8, guard=True)
    values = reference.encode_values(y, bits=2, guard=True)
    metal.readable = dict.fromkeys(kernels._PLANES, (np.arange(CAPACITY) < n_tokens)[:, None])
    queries = rng.standard_normal((1, 1, 1, 64)).astype(np.float32)
    planes = PackedKeys(*map(mx.array, keys)), PackedValues(*map(mx.array, values))
    scores = kernels.Scores(0.125)
    got = np.array(kernels.attend(mx.array(queries), planes, n_tokens, Turbo(8, 2), scores))
    k = reference.decode_keys(keys, bits=8)[:, :, :n_tokens]
    v = reference.decode_values(values, bits=2, head_dim=64)[:, :, :n_tokens]
    weights = np.exp(queries @ k.swapaxes(2, 3) / 8)
    want = weights @ v / weights.sum(-1, keepdims=True)
    assert np.linalg.norm(got - want) <= TOLERANCE["float32"] * np.linalg.norm(want)


@pytest.mark.usefixtures("metal")
def test_a_query_that_is_not_a_number_gives_no_number(rng):
    planes, _ = definition.make_planes(rng, 64, (8, 3))
    packed = PackedKeys(*map(mx.array, planes[:3])), PackedValues(*map(mx.array, planes[3:]))
    queries = np.ones((len(LENGTHS), 2, 1, 64), np.float32)
    queries[3, 1, 0, 5] = np.nan
    rows = kernels.Rows(mx.array(STARTS), mx.array(LENGTHS), max(LENGTHS))
    got = np.array(
        kernels.attend(mx.array(queries), packed, rows, Turbo(8, 3), kernels.Scores(0.1))
    )
    assert np.isnan(got[3, 1]).all()
    assert np.isfinite(got[:3]).all()
    assert np.isfinite(got[3, 0]).all()


def test_rows_longer_than_they_claim_are_cut(rng, metal):
    planes, _ = definition.make_planes(rng, 64, (8, 3))
    packed = PackedKeys(*map(mx.array, planes[:3])), PackedValues(*map(mx.array, planes[3:]))
    packed = PackedKeys(*(p[3:] for p in packed[0])), PackedValues(*(p[3:] for p in packed[1]))
    queries = mx.array(rng.standard_normal((1, 2, 1, 64)).astype(np.float32))
    metal.readable = dict.fromkeys(kernels._PLANES, (np.arange(CAPACITY) < 100)[:, None])
    claimed = kernels.Rows(mx.array([-5]), mx.array([10**6]), 100)
    cut, short = (
        kernels.attend(queries, packed, tokens, Turbo(8, 3), kernels.Scores(0.125))
        for tokens in (claimed, 100)
    )
    assert mx.array_equal(cut, short)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.usefixtures("metal")
def test_encoded_bytes_are_those_of_the_definition(rng, head_dim, search):
    widths = {64: (8, 3), 128: (8, 5), 256: (4, 8), 512: (5, 2)}[head_dim]
    keys = mx.array(definition.hard_vectors(rng, head_dim))
    values = keys[::-1]
    got = kernels.encode(keys, values, Turbo(*widths, search=search))
    k, v = (np.array(x.astype(mx.float32)) for x in (keys, values))
    want = (
        *reference.encode_keys(k, bits=widths[0], guard=True, search=search),
        *reference.encode_values(v, bits=widths[1], guard=True, search=search),
    )
    for mine, expected in zip((*got[0], *got[1]), want, strict=True):
        assert np.array(mine).dtype == expected.dtype
        np.testing.assert_array_equal(np.array(mine), expected)


@pytest.fixture
def unchecked(monkeypatch, tmp_path):
    """A machine on which no kernel was checked yet."""
    monkeypatch.setenv("KVSTOW_CACHE", str(tmp_path))
    stand_in.new_process(monkeypatch)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("task", parity.sample(), ids=str)
def test_the_parity_suite_passes(metal, task):
    outcome = selfcheck.check(task)
    assert outcome.why == ""
    assert outcome.kernel.startswith("kvstow_metal_")
    assert metal


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        (0, ("exp2(score - greatest)", "exp2(0.9f * (score - greatest))"), "attention is off by"),
        (1, ("EPS = 1e-8f", "EPS = 1e-3f"), "codes differ"),
    ],
)
def test_a_kernel_that_is_off_fails_its_check(metal, monkeypatch, task, change, said):
    header = kernels.metal_header
    monkeypatch.setattr(kernels, "metal_header", lambda name: header(name).replace(*change))
    assert said in selfcheck.check(parity.sample()[task]).why
    assert metal


# --- launches


def test_every_kernel_fits_a_threadgroup_and_has_a_name_of_its_own():
    device = plans.MetalDevice()
    made = {
        device.decode_kernel(pair, head_dim, dtype, n_rows)
        for pair in PAIRS
        for head_dim in HEAD_DIMS
        for dtype in FLOATS
        for n_rows in (1, 2, 3, 128)
    }
    assert {kernel.rows for kernel in made} == {1, 2, 4}
    assert len({kernel.name for kernel in made}) == len(made)
    assert max(4 * kernel.shared_floats for kernel in made) <= 32_768
    assert all(kernel.threads <= 1024 for kernel in made)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("n_tokens", [0, 1, 64, 65, 4096, 2**20])
@pytest.mark.parametrize("batch", [1, 64])
def test_splits_cover_what_is_seen_and_no_more(batch, n_tokens, window):
    shape = plans.Shape(batch, 32, 8, 3, 128, n_tokens)
    plan = plans.plan_metal(shape, (8, 3), "bfloat16", window)
    seen = min(n_tokens, window + 2) if window else n_tokens
    assert plan.n_splits * plan.chunk >= seen
    assert (plan.n_splits - 1) * plan.chunk < max(seen, 1)
    assert plan.grid == (-(-plan.n_splits // 4), 8 * 3, batch)


def test_heads_capacity_and_tokens_are_checked_as_for_cuda(metal):
    x = np.zeros((1, 2, 16, 64), np.float32)
    keys, values = kernels.encode(mx.array(x), mx.array(x), Turbo(8, 3))
    scores = kernels.Scores(0.125)
    with pytest.raises(ValueError, match="multiple of KV heads, got 3 and 2"):
        kernels.attend(mx.zeros((1, 3, 1, 64)), (keys, values), 5, Turbo(8, 3), scores)
    with pytest.raises(ValueError, match="17 tokens do not fit"):
        kernels.attend(mx.zeros((1, 4, 1, 64)), (keys, values), 17, Turbo(8, 3), scores)
    with pytest.raises(ValueError, match="must be alike"):
        kernels.encode(mx.array(x), mx.array(x).astype(mx.float16), Turbo(8, 3))
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got int32"):
        kernels.encode(*[mx.zeros((1, 2, 3, 64), mx.int32)] * 2, Turbo(8, 3))
    empty = mx.zeros((1, 2, 0, 64))
    assert [p.shape[2] for p in kernels.encode(empty, empty, Turbo(8, 3))[0]] == [0, 0, 0]
    assert len(metal) == 1


# --- the stand-in finds faults


def launch(metal, source, inputs=(), header="#include <metal_stdlib>\n", n=64):
    kernel = metal.metal_kernel(
        name="small",
        input_names=[f"in{i}" for i in range(len(inputs))],
        output_names=["out"],
        header=header,
        source=f"uint i = thread_index_in_threadgroup;\n{source}",
    )
    return kernel(
        inputs=list(inputs),
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(n,)],
        output_dtypes=[mx.float32],
    )[0]


SHARED = "threadgroup float x[64];\nx[i] = i;\n"
BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"


def test_a_small_kernel_runs(metal):
    got = launch(metal, f"{SHARED}{BARRIER} out[i] = x[63 - i] + in0[i];", [mx.ones(64)])
    assert got.tolist() == [64.0 - i for i in range(64)]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("out[i] = in0[i + 1];", "no byte to read of in0 at 256"),
        ("out[i + 1] = in0[i];", "no byte to write of out at 256"),
        ("out[i / 2] = 1;", "no byte to write of out at 0"),
        ("out[i] = *(const device float*)((const device char*)in0 + 2);", "not aligned of in0"),
        (f"{SHARED}out[i] = x[63 - i];", "read before it is written"),
        (f"{SHARED}out[i] = x[i ? i - 1 : 0];", "no barrier after a write"),
        (f"{SHARED}{BARRIER}out[i] = x[0]; if (i == 0) x[0] = 1;", "no barrier after a read"),
        (f"if (i) {BARRIER} out[i] = 0;", "threads wait for others"),
        ("if (i) out[i] = metal::simd_shuffle_xor(in0[i], ushort(1));", "threads wait"),
        ("threadgroup float y[9000];\ny[i] = 0; out[i] = 0;", "too much threadgroup memory"),
    ],
)
def test_a_fault_of_a_kernel_is_found(metal, source, said):
    with pytest.raises(MemoryError, match=said):
        launch(metal, source, [mx.ones(64)])


def test_what_was_not_written_is_not_read(metal):
    half = launch(metal, "if (i < 32) out[i] = 0;")
    with pytest.raises(MemoryError, match="no byte to read of in0 at 128"):
        launch(metal, "out[i] = in0[i];", [half])


@pytest.mark.parametrize(
    ("header", "source", "said"),
    [
        ("float f(const device float* p) { return p[0]; }", "out[i] = f(in0);", "no matching"),
        ("float f(const float* p) { return p[0]; }", "out[i] = 0;", "p has no address space"),
        ("float f(float (&p)[2]) { return p[0]; }", "out[i] = 0;", "p has no address space"),
        ("constexpr float C = 1;", "out[i] = C;", "C has no address space"),
        ("struct S { static constexpr int N = 1; };", "out[i] = 0;", "N has no address space"),
    ],
)
def test_an_address_space_that_is_wrong_or_missing_is_found(metal, header, source, said):
    with pytest.raises(SyntaxError, match=said):
        launch(metal, source, [mx.ones(3)], f"#include <metal_stdlib>\n{header}\n")  # 3: constant

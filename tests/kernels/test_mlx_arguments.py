"""What the MLX loader says and does before anything is launched, so without a GPU too."""

import numpy as np
import pytest

from kvstow.codec import reference
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.codec.tables import BOUNDARIES, CENTROIDS, SIGNS
from kvstow.kernels.arguments import DECODE_COUNTS
from kvstow.kernels.plan import Device
from kvstow.scheme import HEAD_DIMS, VALUE_BITS, Turbo

mx = pytest.importorskip("mlx.core")
kernels = pytest.importorskip("kvstow.kernels.mlx")
build = pytest.importorskip("kvstow.kernels.mlx_build")

pytestmark = pytest.mark.mlx
K8V3 = Turbo(8, 3)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(kernels, "device", lambda: Device(90, 132))


def planes(capacity, head_dim=64):
    x = np.zeros((1, 2, capacity, head_dim), np.float32)
    keys = reference.encode_keys(x, bits=8, guard=True)
    values = reference.encode_values(x, bits=3, guard=True)
    return PackedKeys(*map(mx.array, keys)), PackedValues(*map(mx.array, values))


def attend(n_heads=4, dtype=mx.float32, capacity=256, n_tokens=5):
    queries = mx.zeros((1, n_heads, 1, 64), dtype)
    return kernels.attend(queries, planes(capacity), n_tokens, K8V3, kernels.Scores(0.125))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of KV heads, got 3 and 2"):
        attend(n_heads=3)


def test_a_capacity_that_copies_cannot_follow_is_refused():
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        attend(capacity=12)


def test_more_tokens_than_the_planes_hold_are_refused():
    with pytest.raises(ValueError, match="257 tokens do not fit in a capacity of 256"):
        attend(n_tokens=257)


def test_queries_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got int32"):
        attend(dtype=mx.int32)


def test_keys_and_values_must_be_alike():
    x = mx.zeros((1, 2, 3, 64))
    with pytest.raises(ValueError, match="must be alike"):
        kernels.encode(x, x.astype(mx.float16), K8V3)


def test_no_tokens_are_encoded_as_no_tokens():
    x = mx.zeros((1, 2, 0, 64))
    keys, values = kernels.encode(x, x, K8V3)
    assert [plane.shape for plane in keys] == [(1, 2, 0, 64), (1, 2, 0, 2), (1, 2, 0, 2)]
    assert [plane.shape for plane in values] == [(1, 2, 0, 24), (1, 2, 0, 2)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", VALUE_BITS)
def test_constants_lie_where_the_kernel_looks_for_them(head_dim, bits):
    counts = list(range(len(DECODE_COUNTS) + 1))
    made = np.array(build.constants(head_dim, bits, tuple(counts)))
    assert made[: len(counts)].tolist() == counts
    tables = made[build.AT_TABLES :]
    floats, n = tables[: 2 << bits].view(np.float32), 1 << bits
    np.testing.assert_array_equal(floats[:n], CENTROIDS[bits])
    np.testing.assert_array_equal(floats[n:-1], BOUNDARIES[bits])
    np.testing.assert_array_equal(tables[2 << bits :].view(np.int8), SIGNS[head_dim])


def test_layers_of_a_step_share_what_is_made_on_the_host(monkeypatch):
    made = []

    def callable_of(*_):
        def launch(**given):
            made.append(given["inputs"])
            return [mx.zeros((1, 4, 1, 64))] * 2

        return launch

    monkeypatch.setattr(kernels, "decode_callable", callable_of)
    kernels._prepare.cache_clear()
    attend()
    attend()
    kernels._prepare.cache_clear()
    first, second = made
    assert first[6] is second[6]  # constants
    assert first[7] is not second[7]  # arrivals
    assert not first[7].any()


def test_arrays_are_given_in_the_order_of_their_names(monkeypatch):
    given = []

    def callable_of(*_):
        return lambda inputs, **_: given.append(inputs) or [mx.zeros((1, 4, 1, 64))]

    monkeypatch.setattr(kernels, "decode_callable", callable_of)
    kernels._prepare.cache_clear()
    queries, (keys, values), sinks = mx.zeros((1, 4, 1, 64)), planes(256), mx.zeros((4,))
    rows = kernels.Rows(mx.array([0], mx.int32), mx.array([5], mx.int32), 5)
    scores = kernels.Scores(0.125, sinks=sinks)
    call = kernels.planned(queries, (keys, values), rows, K8V3, scores, stores=4)
    exact, after, others = (mx.zeros((1, 2, 1, 64)),) * 2, mx.zeros((1,)), mx.ones((4,))
    call(queries, (keys, values), exact, after, others)
    kernels._prepare.cache_clear()
    (inputs,) = given
    named = [
        *keys,
        *values,
        queries,
        *inputs[6:8],
        after,
        rows.starts,
        rows.lengths,
        others,
        *exact,
    ]
    assert len(inputs) == len(named)
    for got, want in zip(inputs, named, strict=True):
        assert mx.array_equal(got, want)
    assert inputs[11].tolist() == [1, 1, 1, 1]  # this layer's sinks, not those it was planned with


@pytest.mark.parametrize(
    ("n_queries", "search", "at", "got"),
    [
        (2, False, 4, "of 5, 2 and"),
        (1, True, 4, r"\+search"),
        (1, False, 5, "token 5 of 5"),
        (1, False, -1, "token -1"),
    ],
)
def test_a_token_is_stored_for_one_query_and_without_a_search(n_queries, search, at, got):
    queries, scores = mx.zeros((1, 4, n_queries, 64)), kernels.Scores(0.125)
    scheme = Turbo(8, 3, search=search)
    with pytest.raises(ValueError, match=f"one query token and without a search.*{got}"):
        kernels.planned(queries, planes(256), 5, scheme, scores, stores=at)

"""The definition of attention against loops over rows, in float64."""

import numpy as np
import pytest

from kvstow.attention import reference
from kvstow.codec import reference as codec
from kvstow.scheme import Turbo

SCHEME = Turbo(8, 4)
B, HQ, H, L, T, D = 2, 6, 2, 3, 9, 64


@pytest.fixture
def problem(rng):
    q = rng.standard_normal((B, HQ, L, D)).astype(np.float32)
    k, v = rng.standard_normal((2, B, H, T, D)).astype(np.float32)
    keys = codec.encode_keys(k, bits=SCHEME.key_bits)
    values = codec.encode_values(v, bits=SCHEME.value_bits)
    return q, keys, values


def row_by_row(q, keys, values, looks_at, sinks=None):
    """Attention of each query row over the stored tokens that `looks_at` lists for it."""
    k = codec.decode_keys(keys, bits=SCHEME.key_bits).astype(np.float64)
    v = codec.decode_values(values, bits=SCHEME.value_bits, head_dim=D).astype(np.float64)
    out = np.zeros(q.shape)
    for b, head, i in np.ndindex(q.shape[:3]):
        at, group = looks_at(b, head, i), head // (HQ // H)
        weights = np.exp(k[b, group, at] @ q[b, head, i].astype(np.float64) * D**-0.5)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
        out[b, head, i] = weights / total @ v[b, group, at]
    return out


def attend(q, keys, values, mask=None):
    return reference.attend(q, keys, values, scheme=SCHEME, scale=D**-0.5, mask=mask)


# Sums of 64 and of 9 float32 products, against float64.
def close(got, wanted):
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)


def test_without_a_mask_every_query_looks_at_every_token(problem):
    close(attend(*problem), row_by_row(*problem, lambda *_: list(range(T))))


def test_causal_means_that_the_last_query_is_the_last_token(problem):
    wanted = row_by_row(*problem, lambda _b, _h, i: list(range(T - L + i + 1)))
    close(attend(*problem, mask="causal"), wanted)


def test_true_in_a_mask_lets_a_query_look(problem, rng):
    mask = rng.random((B, HQ, L, T)) < 0.6
    mask[..., 0] = True
    wanted = row_by_row(*problem, lambda b, h, i: np.flatnonzero(mask[b, h, i]))
    close(attend(*problem, mask=mask), wanted)


def test_numbers_in_a_mask_are_added_to_the_scores(problem):
    forbidden = np.where(np.arange(T) < 4, 0, -np.inf).astype(np.float32)
    close(attend(*problem, mask=forbidden), row_by_row(*problem, lambda *_: list(range(4))))


def test_a_sink_takes_weight_and_gives_no_value(problem, rng):
    sinks = rng.normal(0, 3, HQ).astype(np.float32)
    wanted = row_by_row(*problem, lambda *_: list(range(T)), sinks)
    q, keys, values = problem
    got = reference.attend(q, keys, values, scheme=SCHEME, scale=D**-0.5, sinks=sinks)
    close(got, wanted)


def test_one_stored_token_is_the_answer_whatever_the_query(problem):
    q, keys, values = problem
    first = type(values)(*(plane[:, :, :1] for plane in values))
    out = attend(q, type(keys)(*(plane[:, :, :1] for plane in keys)), first)
    v = codec.decode_values(first, bits=SCHEME.value_bits, head_dim=D)
    close(out, np.broadcast_to(np.repeat(v, HQ // H, axis=1), out.shape))

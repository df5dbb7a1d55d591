"""One packed layer without a model, and what the definition makes of the same tokens."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from kvstow.codec import reference as codec
from tests.integration import row_lists

H, D = row_lists.H, row_lists.D
turbo, join, cut = row_lists.turbo, row_lists.join, row_lists.cut


def encode(tokens, scheme):
    """The five planes of the definition."""
    return (
        *codec.encode_keys(tokens.k, bits=scheme.key_bits, guard=True, search=scheme.search),
        *codec.encode_values(tokens.v, bits=scheme.value_bits, guard=True, search=scheme.search),
    )


def decode(tokens, scheme):
    """What is left of `tokens` after storing them."""
    planes = encode(tokens, scheme)
    return SimpleNamespace(
        k=codec.decode_keys(codec.PackedKeys(*planes[:3]), bits=scheme.key_bits),
        v=codec.decode_values(
            codec.PackedValues(*planes[3:]), bits=scheme.value_bits, head_dim=tokens.v.shape[-1]
        ),
    )


def append(cache, tokens):
    """What the append attends to, as numpy, whichever way the cache fetches."""
    return row_lists.decoded(cache.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v)))


def filled(cls, *pieces, scheme="turbo:k8v3"):
    cache = cls(turbo(scheme))
    for piece in pieces:
        append(cache, piece)
    return cache


def assert_same(got, wanted):
    """Bit for bit."""
    for a, b in ((got.k, wanted.k), (got.v, wanted.v)):
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def assert_stores(cache, tokens):
    """The cache holds the bytes that the definition makes of `tokens`."""
    assert cache.is_packed
    keys, values = cache.packed()
    for got, wanted in zip((*keys, *values), encode(tokens, cache.scheme), strict=True):
        got = np.array(got)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes()

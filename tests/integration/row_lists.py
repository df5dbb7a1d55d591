"""Rows as plain numpy, one array of tokens each: the definition of what each attends to."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx_lm.models import base

from kvstow import Scheme
from kvstow.attention.mlx import decode_window
from kvstow.attention.window import PackedWindow
from kvstow.integrations.mlx_lm import PackedKVCache

H, D = 2, 64


class Tokens:
    """Draws tokens, keys and values ``(1, H, n, D)``, that never repeat."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, n):
        k, v = self.rng.standard_normal((2, 1, H, n, D)).astype(np.float32)
        return SimpleNamespace(k=k, v=v)


def join(*pieces):
    return SimpleNamespace(
        k=np.concatenate([p.k for p in pieces], axis=2),
        v=np.concatenate([p.v for p in pieces], axis=2),
    )


def cut(tokens, start, end):
    return SimpleNamespace(k=tokens.k[:, :, start:end], v=tokens.v[:, :, start:end])


def turbo(text="turbo:k8v3"):
    return Scheme.parse(text)


def stored(scheme, tokens):
    """What is left of `tokens` after storing them, which depends on nothing around them."""
    cache = PackedKVCache(Scheme.parse(f"turbo:k{scheme.key_bits}v{scheme.value_bits}"))
    cache.update_and_fetch(mx.array(tokens.k), mx.array(tokens.v))
    k, v = map(np.array, cache.keys_and_values())
    return SimpleNamespace(k=k, v=v)


def planes(packed):
    return [np.array(plane) for part in packed for plane in part]


def visible(mask, b, n, width):
    """A mask of mlx-lm's as booleans ``(b, n, width)``."""
    if mask is None:
        mask = mx.ones((n, width), mx.bool_)
    elif isinstance(mask, str):
        mask = base.create_causal_mask(n, width - n)
    return np.broadcast_to(np.array(mask), (b, 1, n, width))[:, 0]


def padded(pieces, width):
    """Rows joined, with pads of noise on the right."""
    noise = np.random.default_rng(1)
    arrays = []
    for name in "kv":
        x = noise.standard_normal((len(pieces), H, width, D)).astype(np.float32)
        for i, piece in enumerate(pieces):
            x[i, :, : piece.k.shape[2]] = getattr(piece, name)[0]
        arrays.append(mx.array(x))
    return arrays


def decoded(fetched):
    """What an append returned, as numpy."""
    if isinstance(fetched[0], PackedWindow):
        assert fetched[0] is fetched[1]
        fetched = decode_window(fetched[0], mx.float32, rotated=False)
    return SimpleNamespace(k=np.array(fetched[0]), v=np.array(fetched[1]))


class Row:
    """One row, with all the tokens that it was ever given.

    Args:
        scheme: What it is stored under.
        tokens: What it holds.
        packed: Whether that is stored.
        window: How many tokens each token sees, itself included; None: all.
    """

    def __init__(self, scheme, tokens, packed, window=None):
        self.scheme, self.tokens, self.packed, self.window = scheme, tokens, packed, window

    @property
    def n(self):
        return self.tokens.k.shape[2]

    def append(self, piece):
        """Of each token of `piece`, the tokens that it attends to."""
        before = self.n
        self.tokens = join(self.tokens, piece)
        packs = 0 < self.n >= (self.scheme.start_tokens or 1)
        exact = not self.packed and not (packs and self.scheme.stored)
        self.packed = self.packed or packs
        seen = self.tokens if exact else stored(self.scheme, self.tokens)
        ends = range(before + 1, self.n + 1)
        return [cut(seen, max(0, end - (self.window or end)), end) for end in ends]

    def trim(self, n):
        self.tokens = cut(self.tokens, 0, max(0, self.n - n))
        self.packed = self.packed and self.n > 0

    def copy(self):
        return Row(self.scheme, self.tokens, self.packed, self.window)


def assert_sees(got, wanted, *, in_order):
    """The columns ``(H, n, D)`` that a token sees are `wanted`, bit for bit."""
    columns = []
    for tokens in (got, SimpleNamespace(k=wanted.k[0], v=wanted.v[0])):
        both = np.concatenate([tokens.k, tokens.v], axis=-1).swapaxes(0, 1)
        columns.append([column.tobytes() for column in both])
    if not in_order:  # a window that is full is a ring, and attention does not mind
        columns = list(map(sorted, columns))
    assert columns[0] == columns[1]


def append(batch, rows, pieces, chunk=None):
    """Append ragged `pieces`, as mlx-lm does, in chunks; each token sees what its row holds."""
    lengths = [piece.k.shape[2] for piece in pieces]
    width, ragged = max(lengths), len(set(lengths)) > 1
    k, v = padded(pieces, width)
    if ragged:
        batch.prepare(lengths=lengths, right_padding=[width - n for n in lengths])
    for at in range(0, width, chunk or width):
        end = min(at + (chunk or width), width)
        before, offset = [row.n for row in rows], np.array(batch.offset)
        mask = batch.make_mask(end - at)
        got = decoded(batch.update_and_fetch(k[:, :, at:end], v[:, :, at:end]))
        seen = visible(mask, len(rows), end - at, got.k.shape[2])
        for i, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            each = row.append(cut(piece, at, end))
            if each:
                assert offset[i] == before[i]
            for j, wanted in enumerate(each):
                columns = SimpleNamespace(k=got.k[i][:, seen[i, j]], v=got.v[i][:, seen[i, j]])
                assert_sees(columns, wanted, in_order=row.window is None)
    if ragged:
        batch.finalize()

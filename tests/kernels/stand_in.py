"""Stands for `kvstow.kernels.mlx` on a machine without a GPU: the same calls, recorded."""

from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import pytest

from kvstow.attention import arrival, fused, notices, parity, selfcheck, step
from kvstow.attention.mlx import attend as attend_deferred
from kvstow.attention.window import PackedWindow
from kvstow.codec import mlx as codec
from kvstow.kernels import backend as real
from kvstow.kernels.plan import Device


@dataclass
class Attended:
    """What `attend` was called with; `starts` and `lengths` are lists or None."""

    shape: tuple
    capacity: int
    longest: int
    starts: list | None
    lengths: list | None
    window: int
    scale: float
    after: mx.array | None = None  # what it waited for


@dataclass
class StandIn:
    """Attends as the kernel says it does, by MLX's operations, and encodes with the codec.

    A query that sees nothing gets zeros, and what is outside the rows is not used.
    """

    attended: list[Attended] = field(default_factory=list)
    encoded: list[tuple] = field(default_factory=list)
    appended: list[tuple] = field(default_factory=list)  # shapes and positions
    stored: list[tuple] = field(default_factory=list)  # the same, of what attention stores
    waited: list = field(default_factory=list)  # for what, of each of both
    error: BaseException | None = None  # of every call
    attention_off: float = 0.0  # added to every output
    tokens: list[mx.array] = field(default_factory=list)  # what calls have returned
    bytes_off: bool = False  # whether encoded scales are wrong

    Rows = real.Rows
    Scores = real.Scores

    def name(self):
        return "cuda"

    def device(self):
        return Device.of(90)

    def attend(self, queries, planes, tokens, scheme, scores, *, after=None):
        self.raise_if_told()
        assert after is None or any(after is token for token in self.tokens)
        keys, values = planes
        b, _, n, _ = queries.shape
        capacity = keys.scales.shape[2]
        assert capacity % 8 == 0
        assert isinstance(scores.scale, float)
        assert scores.sinks is None
        ragged = isinstance(tokens, real.Rows)
        longest = tokens.longest if ragged else tokens
        assert longest <= capacity
        starts = np.array(tokens.starts) if ragged else np.zeros(b, int)
        lengths = np.array(tokens.lengths) if ragged else np.full(b, longest)
        self.attended.append(
            Attended(
                queries.shape,
                capacity,
                longest,
                starts.tolist() if ragged else None,
                lengths.tolist() if ragged else None,
                scores.window,
                scores.scale,
                after,
            )
        )
        if ragged:
            assert (tokens.starts.dtype, tokens.lengths.dtype) == (mx.int32, mx.int32)
        at = np.arange(longest)
        own = (lengths[:, None] - n + np.arange(n))[:, :, None]
        seen = (at >= starts[:, None, None]) & (at <= own)
        if scores.window:
            seen &= at > own - scores.window
        clean = [
            type(part)(*(mx.where(mx.isnan(p), 0, p) if p.dtype == mx.float16 else p for p in part))
            for part in (keys, values)
        ]
        window = PackedWindow(*clean, longest, scheme)
        mask = None if seen.all() else mx.array(seen[:, None])
        output = attend_deferred(queries, window, scale=scores.scale, mask=mask)
        sees = mx.array(seen.any(-1)[:, None, :, None])
        output = mx.where(sees, output + self.attention_off, 0).astype(queries.dtype)
        # Read when it is computed, unless somebody waits for it, and for what it waits for.
        self.tokens.append(output if after is None else mx.depends(output, [after]))
        return self.tokens[-1]

    def encode(self, keys, values, scheme):
        self.raise_if_told()
        self.encoded.append((keys.shape, str(scheme)))
        return self._encoded(keys, values, scheme)

    def _encoded(self, keys, values, scheme):
        k = codec.encode_keys(keys, bits=scheme.key_bits, guard=True, search=scheme.search)
        v = codec.encode_values(values, bits=scheme.value_bits, guard=True, search=scheme.search)
        return (k._replace(scales=k.scales + 1), v) if self.bytes_off else (k, v)

    def can_append(self):
        return True

    def append(self, planes, position, exact, scheme, *, after=None):
        """Write to the memory of the planes, at once: whoever shares it will see."""
        assert after is None or any(after is token for token in self.tokens)
        keys, values = exact
        made = self._encoded(keys, values, scheme)
        self.appended.append((keys.shape, position))
        self.waited.append(after)
        mx.eval(planes, made, [] if after is None else after)
        for plane, rows in zip(planes, (*made[0], *made[1]), strict=True):
            memory = np.asarray(plane)
            assert memory.flags.writeable
            assert memory.flags.c_contiguous
            memory[:, :, position : position + keys.shape[2]] = np.array(rows)
        self.tokens.append(mx.array([position]))
        return self.tokens[-1]

    def planned(self, _queries, _planes, tokens, scheme, scores, *, stores=None):
        def call(queries, planes, exact=(), after=None, sinks=None):
            given = queries, planes, tokens, scheme, replace(scores, sinks=sinks)
            if stores is not None:
                return self.store_and_attend(*given, exact, stores, after=after)
            return self.attend(*given, after=after)

        return call

    def store_and_attend(  # noqa: PLR0913  what `attend` takes, and the token
        self, queries, planes, tokens, scheme, scores, exact, position, *, after=None
    ):
        """Both, one after the other; the positions go to `stored`."""
        longest = tokens.longest if isinstance(tokens, real.Rows) else tokens
        assert queries.shape[2] == exact[0].shape[2] == 1
        assert queries.dtype == exact[0].dtype
        assert not scheme.search
        assert 0 <= position < longest
        five = (*planes[0], *planes[1])
        there = self.append(five, position, exact, scheme, after=after)
        self.appended.pop()
        self.stored.append((exact[0].shape, position))
        return self.attend(queries, planes, tokens, scheme, scores, after=there)

    def raise_if_told(self):
        if self.error is not None:
            raise self.error

    def forget(self):
        """Whatever was recorded, the calls of self-checks too."""
        self.attended.clear()
        self.encoded.clear()
        self.appended.clear()
        self.stored.clear()


def new_process(monkeypatch):
    """What a process knows at its start."""
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(fused, "_last", step.Last())
    monkeypatch.setattr(fused, "_counts", type(fused._counts)())


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU, also where there is one."""
    monkeypatch.setattr(real, "name", str)


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A GPU that is not there, with an empty cache directory."""
    stand_in = StandIn()
    monkeypatch.setenv("KVSTOW_CACHE", str(tmp_path / "cache"))
    for module in (arrival, fused, parity, selfcheck):
        monkeypatch.setattr(module, "kernels", stand_in)
    monkeypatch.setattr(fused, "why_no_device", str)
    new_process(monkeypatch)
    return stand_in

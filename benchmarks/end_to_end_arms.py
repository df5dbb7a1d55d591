"""What takes turns in `bench_end_to_end.py`: a scheme with a cache full of noise, on one model."""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from kvstow.attention import fused
from kvstow.capacity import bytes_per_token
from kvstow.errors import KvstowError
from kvstow.integrations import attach, usage
from kvstow.integrations.mlx_lm import attachment, read_shape, restore
from kvstow.integrations.report import fetch_of
from kvstow.scheme import Off, Scheme

STEP_TOKENS = 256  # by which caches grow; no turn below grows one after the first
AHEAD = 2  # steps of a turn before its clock starts: one that has ended, one that computes
NOISE_TOKENS = 4096  # repeated where a cache holds more: drawing takes several times their bytes


@dataclass(frozen=True)
class Cell:
    """Rows of a batch, and the tokens that each has cached."""

    batch: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        batch, _, tokens = text.partition("x")
        return cls(int(batch), int(tokens))


def filled(model: Any, cell: Cell, dtype: mx.Dtype) -> list[Any]:
    """The prompt cache of `model`, as it is attached, holding noise."""
    cache, drawn = make_prompt_cache(model), {}
    for i, layer in enumerate(read_shape(model).layers):
        tokens = min(cell.tokens, layer.window or cell.tokens)
        of_layer = (cell.batch, layer.n_kv_heads, tokens, layer.key_dim)
        if of_layer not in drawn:
            drawn[of_layer] = [noise(of_layer, dtype) for _ in "kv"]
        cache[i].update_and_fetch(*drawn[of_layer])
        mx.eval(cache[i].state)
        mx.clear_cache()
    return cache


def noise(shape: tuple[int, int, int, int], dtype: mx.Dtype) -> mx.array:
    _, heads, tokens, width = shape
    drawn = mx.random.normal((1, heads, min(tokens, NOISE_TOKENS), width), dtype)
    return mx.broadcast_to(drawn[:, :, mx.arange(tokens) % NOISE_TOKENS], shape)


def turn_ms(model: Any, cache: list[Any], batch: int, n: int) -> float:
    """Time of a step, of `n` in the midst of decoding.

    As in mlx-lm, the next graph is built while one computes: the clock runs from the end of one
    step to the end of another, and one more is under way at both.
    """

    def follow(token: mx.array) -> mx.array:
        following = mx.argmax(model(token, cache=cache)[:, -1], axis=-1, keepdims=True)
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        return following

    before = follow(mx.zeros((batch, 1), mx.int32))
    token = follow(before)
    mx.eval(before)
    begin = time.perf_counter()
    for _ in range(n):
        following = follow(token)
        mx.eval(token)
        token = following
    end = time.perf_counter()
    mx.eval(token)
    return 1e3 * (end - begin) / n


class Bench:
    """A model, and its attachments, each of which is made once and put in place for a turn.

    Args:
        model: With nothing attached.
        options: As parsed.
    """

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        self.model, self.options = model, options
        self.shape = read_shape(model)
        self.active = int(mx.get_active_memory())  # weights
        self._attachments: dict[str, tuple[Any, str]] = {}
        self._short: dict[tuple[str, Cell], str] = {}

    @contextmanager
    def attached(self, scheme: Scheme) -> Iterator[str]:
        """Yields the path of attention. Nothing is attached before and after."""
        name = str(scheme)
        if name not in self._attachments:
            report = attach(self.model, scheme, fetch=fetch_of(scheme, self.options.fetch))
            self._attachments[name] = attachment(self.model), report.fetch
        factory, path = self._attachments[name]
        restore(self.model, factory)
        try:
            yield path
        finally:
            restore(self.model, None)

    def needed_bytes(self, schemes: Iterable[Scheme], cell: Cell) -> int:
        """Weights, a cache of each scheme with room to grow, and what growing its layers takes.

        MLX grows a layer while it holds another: two at a time, in the bytes of the scheme. Where
        no kernel attends to what is stored, a step decodes a layer instead, which takes more.
        """
        parameters: Any = tree_flatten(self.model.parameters())
        weights = sum(array.nbytes for _, array in parameters)
        of_rows = cell.batch * (cell.tokens + 2 * STEP_TOKENS)
        layers = max(1, len(self.shape.of_kind("full", "plain")))
        caches = [of_rows * bytes_per_token(self.shape, scheme) for scheme in schemes]
        decodes = self.options.fetch == "deferred" or fused.why_no_device()
        decoded = of_rows * bytes_per_token(self.shape, Off()) if decodes else 0
        logits = 4 * cell.batch * self.shape.vocab_size * 4
        return int(weights + sum(caches) + 2 * max(*caches, decoded) // layers + logits)

    def fits(self, schemes: Iterable[Scheme], cell: Cell) -> bool:
        """Whether these fit beside each other."""
        return bool(self.needed_bytes(schemes, cell) <= self.options.memory_bytes)

    def refusal(self, scheme: Scheme, cell: Cell) -> str:
        """How a scheme fails on short caches of this batch; empty if it does not.

        They are as long as those of the cell, less steps of growth: kernels may need multiples.
        """
        short = Cell(cell.batch, STEP_TOKENS + cell.tokens % STEP_TOKENS)
        key = str(scheme), short
        if key not in self._short:
            arm = Arm(self, scheme, short)
            arm.attempt(lambda: arm.fill(1))
            self._short[key] = f"{arm.refused} (at {short.tokens} tokens)" if arm.refused else ""
        return self._short[key]


class Arm:
    """A scheme on a cell: its cache, and what its turns took.

    Attributes:
        ms: Of a step, for each turn.
        refused: Why it failed; empty if it has not.
    """

    def __init__(self, bench: Bench, scheme: Scheme, cell: Cell) -> None:
        self.scheme, self.ms, self.refused = scheme, list[float](), ""
        self._bench, self._cell = bench, cell
        self._cache: list[Any] = []
        self._calls: Counter[str] = Counter()
        self._held = self._peak = self._growing = 0

    def attempt(self, what: Callable[[], None]) -> None:
        """Do it, or be refused and hold nothing."""
        try:
            what()
        except (RuntimeError, ValueError, KvstowError) as error:  # mlx lacks kernels for affine
            self.refused = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._cache = []

    def fill(self, steps: int) -> None:
        """Fill the cache, and decode a turn, which compiles and grows it."""
        before = int(mx.get_active_memory())
        with self._bench.attached(self.scheme) as self._path:
            dtype = getattr(mx, self._bench.options.dtype)
            self._cache = filled(self._bench.model, self._cell, dtype)
        self._turn(steps)
        self._growing = int(mx.get_peak_memory()) - before + self._bench.active
        self._held = int(mx.get_active_memory()) - before
        self._room = usage(self._cache).kv_bytes
        mx.clear_cache()

    def turn(self) -> None:
        """Decode, and note how long it took."""
        others = int(mx.get_active_memory()) - self._held - self._bench.active
        self.ms.append(self._turn(self._bench.options.steps))
        self._peak = max(self._peak, int(mx.get_peak_memory()) - others)

    def _turn(self, steps: int) -> float:
        calls = fused.counts()
        with self._bench.attached(self.scheme):
            mx.reset_peak_memory()
            ms = turn_ms(self._bench.model, self._cache, self._cell.batch, steps)
        self._calls += fused.counts() - calls
        return ms

    def row(self) -> dict[str, Any]:
        """What was measured, or why not.

        Raises:
            SystemExit: If it was not what it is said to be.
        """
        if self.refused:
            return {"refused": self.refused}
        kv, step = usage(self._cache), statistics.median(self.ms)
        if not isinstance(self.scheme, Off) and kv.kv_bytes >= kv.kv_bytes_bf16:
            raise SystemExit(f"{self.scheme} holds {kv.kv_bytes} bytes, no less than bfloat16")
        if kv.kv_bytes != self._room:
            raise SystemExit(f"the cache of {self.scheme} grew while its turns were timed")
        return {
            "fetch": self._path,
            "attention_calls": dict(self._calls),
            "step_ms": round(step, 4),
            "step_ms_all": [round(x, 4) for x in self.ms],
            "decode_tokens_per_s": round(self._cell.batch * 1e3 / step, 2),
            "kv_bytes": kv.kv_bytes,
            "kv_bytes_bf16": kv.kv_bytes_bf16,
            "peak_memory_bytes": self._peak,
            "peak_memory_bytes_growing": max(self._peak, self._growing),
        }

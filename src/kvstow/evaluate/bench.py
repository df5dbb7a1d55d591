"""Speed and memory of a model's decoding under several schemes, in one run.

Per context length every arm prefills alone (its prompt rate and peak memory),
then all arms decode in turns, so that a machine that slows down slows all of
them; medians are reported. mlx-lm's affine caches do not prefill here: their
attention over a long prompt takes minutes on a CPU. They are converted from the
plain cache, and their prompt rate and peak are None.

An arm that the host cannot run, such as affine caches where mlx's back-end has
no kernel for them, ends alone: its row says why.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from kvstow.capacity import PREFILL_TOKENS
from kvstow.integrations import attached, usage
from kvstow.integrations.mlx_lm import (
    DeferredKVCache,
    FusedKVCache,
    PackedKVCache,
    convert,
    deferred,
)
from kvstow.integrations.mlx_lm.encode import encode
from kvstow.integrations.mlx_lm.shape import read_shape
from kvstow.integrations.report import Fetch, fetch_of
from kvstow.scheme import Affine, Off, Scheme

TURN_TOKENS = 4  # timed in one turn of an arm
TURN_STEPS = TURN_TOKENS + 2  # by which a turn makes the cache longer


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at one context length. Times are medians of the run.

    `attention_share` and `encode_share` are the parts of a decode step that reading
    the cache (decoding included) and encoding one token take when run alone.
    `decode_vs_off` is larger where the arm is faster. Of an arm that could not run,
    `refused` is the reason, and nothing is measured.
    """

    scheme: str
    fetch: str
    context_tokens: int
    prompt_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_ms: float | None = None
    decode_vs_off: float | None = None
    attention_share: float | None = None
    encode_share: float | None = None
    kv_bytes: int | None = None
    kv_bytes_bf16: int | None = None
    peak_memory_bytes: int | None = None
    refused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row, for JSON."""
        return asdict(self)


@dataclass
class _Arm:
    scheme: Scheme
    fetch: Any
    prompt_tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    cache: list[Any] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    attention_ms: list[float] = field(default_factory=list)
    encode_ms: list[float] = field(default_factory=list)
    refused: str | None = None

    def take_turn(self, model: Any, n_heads: int) -> None:
        self.step_ms.append(_token_ms(model, self.cache))
        self.attention_ms.append(_alone_ms(self.cache, partial(_attention, n_heads=n_heads)))
        self.encode_ms.append(_alone_ms(self.cache, _encode))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Note an error of the host, or a refusal of ours, as this arm's alone."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # what mlx raises, and UnsupportedModel
            self.refused = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.cache = []


def run(
    model: Any,
    schemes: list[Scheme],
    contexts: list[int],
    *,
    fetch: Fetch = "auto",
    rounds: int = 8,
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Yield a row per context length and scheme.

    Args:
        model: An mlx-lm model.
        schemes: The arms, in order.
        contexts: Tokens in the cache when decoding is timed.
        fetch: Of the turbo arms.
        rounds: Turns of each arm, after one that warms up.
        on_step: Told what is being run.
    """
    shape = read_shape(model)
    for n_tokens in contexts:
        mx.random.seed(0)
        tokens = mx.random.randint(0, shape.vocab_size, (1, n_tokens))
        arms = [_Arm(s, fetch_of(s, fetch)) for s in schemes]
        plain = _prefill_each(model, arms, tokens, on_step)
        for arm in _running(arms):
            with arm.guarded():
                _convert(model, arm, plain)
        on_step(f"{n_tokens} tokens: decode")
        with deferred.installed():
            for _ in range(1 + rounds):
                for arm in _running(arms):
                    with arm.guarded():
                        arm.take_turn(model, shape.n_heads)
        yield from _rows(arms, n_tokens)


def _running(arms: list[_Arm]) -> list[_Arm]:
    return [arm for arm in arms if arm.refused is None]


def _prefill_each(
    model: Any, arms: list[_Arm], tokens: mx.array, on_step: Callable[[str], None]
) -> list[Any]:
    """Time the prompt of every arm that can prefill; returns the plain cache of one of them."""
    plain = None
    # The plain cache is kept, so its arm goes last: no other peak includes it.
    for arm in sorted(arms, key=lambda arm: isinstance(arm.scheme, Off)):
        if not isinstance(arm.scheme, Affine):
            on_step(f"{tokens.shape[1]} tokens: prompt under {arm.scheme}")
            with arm.guarded():
                cache = _prefill(model, arm, tokens)
                plain = cache if isinstance(arm.scheme, Off) else plain
                del cache
    if plain is None:
        with attached(model, "off"):
            plain = _filled(model, tokens)
    return plain


def _filled(model: Any, tokens: mx.array) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, tokens.shape[1], PREFILL_TOKENS):
        model(tokens[:, start : start + PREFILL_TOKENS], cache=cache)
        mx.eval([c.state for c in cache])
        mx.clear_cache()
    return cache


def _prefill(model: Any, arm: _Arm, tokens: mx.array) -> list[Any]:
    gc.collect()
    mx.clear_cache()
    with attached(model, arm.scheme, fetch=arm.fetch):
        mx.reset_peak_memory()
        begin = time.perf_counter()
        cache = _filled(model, tokens)
        arm.prompt_tokens_per_s = round(tokens.shape[1] / (time.perf_counter() - begin), 2)
        arm.peak_memory_bytes = int(mx.get_peak_memory())
    return cache


def _convert(model: Any, arm: _Arm, plain: list[Any]) -> None:
    with attached(model, arm.scheme, fetch=arm.fetch) as report:
        arm.fetch = report.fetch
        arm.cache = convert(model, copy.deepcopy(plain))
        mx.eval([c.state for c in arm.cache])


def _token_ms(model: Any, cache: list[Any]) -> float:
    """Time of a token as mlx-lm generates it: the next graph is built while one computes."""
    steps = generate_step(mx.array([1]), model, max_tokens=TURN_TOKENS + 1, prompt_cache=cache)
    next(steps)  # waits for whatever still runs of the arm before
    begin = time.perf_counter()
    for _ in steps:
        pass
    return 1e3 * (time.perf_counter() - begin) / TURN_TOKENS


def _rows(arms: list[_Arm], n_tokens: int) -> Iterator[Row]:
    off_ms = next((_median(a.step_ms) for a in _running(arms) if isinstance(a.scheme, Off)), None)
    for arm in arms:
        row = Row(str(arm.scheme), arm.fetch, n_tokens)
        yield replace(row, refused=arm.refused) if arm.refused else _measured(arm, row, off_ms)


def _measured(arm: _Arm, row: Row, off_ms: float | None) -> Row:
    ms, kv = _median(arm.step_ms), usage(arm.cache)
    return replace(
        row,
        prompt_tokens_per_s=arm.prompt_tokens_per_s,
        decode_tokens_per_s=round(1e3 / ms, 2),
        decode_ms=round(ms, 2),
        decode_vs_off=round(off_ms / ms, 3) if off_ms else None,
        attention_share=round(_median(arm.attention_ms) / ms, 3),
        encode_share=round(_median(arm.encode_ms) / ms, 3),
        kv_bytes=kv.kv_bytes,
        kv_bytes_bf16=kv.kv_bytes_bf16,
        peak_memory_bytes=arm.peak_memory_bytes,
    )


def _median(turns: list[float]) -> float:
    """Of all turns but the first, which warms up."""
    return statistics.median(turns[1:])


def _alone_ms(caches: list[Any], part: Callable[[Any], Any]) -> float:
    """Time of `part` over the layers that the schemes compete on."""
    begin = time.perf_counter()
    for cache in caches:
        if isinstance(cache, PackedKVCache | QuantizedKVCache | KVCache):
            mx.eval(part(cache))
    return 1e3 * (time.perf_counter() - begin)


def _attention(cache: Any, n_heads: int) -> Any:
    dtype = mx.float32
    if isinstance(cache, DeferredKVCache | FusedKVCache) and cache.is_packed:
        keys = values = replace(cache.window(), fused=cache.fused)
        head_dim = keys.head_dim
        dtype = cache.dtype if cache.fused else dtype  # the kernel that decoding has used
    else:
        keys, values = cache.keys_and_values()
        plain = keys if isinstance(keys, mx.array) else keys[0]
        head_dim = plain.shape[-1] * (1 if keys is plain else 32 // cache.bits)
    queries = mx.random.normal((1, n_heads, 1, head_dim)).astype(dtype)
    return base.scaled_dot_product_attention(queries, keys, values, cache, head_dim**-0.5, None)


def _encode(cache: Any) -> Any:
    """One token into the cache's format; a plain cache has nothing to encode."""
    if isinstance(cache, QuantizedKVCache) and cache.keys:
        head_dim = cache.keys[0].shape[-1] * 32 // cache.bits
        x = mx.random.normal((*cache.keys[0].shape[:2], 1, head_dim))
        return [mx.quantize(x, group_size=cache.group_size, bits=cache.bits) for _ in "kv"]
    if isinstance(cache, PackedKVCache) and cache.is_packed:
        window = cache.window()
        x = mx.random.normal((*window.keys.scales.shape[:2], 1, window.head_dim))
        x = x.astype(cache.dtype) if cache.fused else x
        return encode(cache.scheme, x, x, fused=cache.fused)
    return ()

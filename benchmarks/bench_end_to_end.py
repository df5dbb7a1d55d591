"""Decoding speed and peak memory of a whole model, batch by context, under every scheme.

    python benchmarks/bench_end_to_end.py --output benchmarks/results/end_to_end.jsonl

Caches are filled with noise, a layer at a time and every row with the same, since what they hold
does not change the speed; ``llama8b`` has the shape of Llama 3.1 8B and random weights. All rows
of a batch are as long as each other and share one cache, which is how mlx-lm is fastest without a
scheme: it needs no mask then. Cells whose bytes exceed the memory of the device are rows that say
so; nothing is tried.

``--longest`` adds the longest context that the estimate lets through, and decodes there.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from kvstow.attention import fused  # noqa: E402
from kvstow.capacity import ModelShape, bytes_per_token  # noqa: E402
from kvstow.errors import KvstowError  # noqa: E402
from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.integrations import attached, usage  # noqa: E402
from kvstow.integrations.mlx_lm import read_shape  # noqa: E402
from kvstow.integrations.report import fetch_of  # noqa: E402
from kvstow.models import load  # noqa: E402
from kvstow.scheme import Off, Scheme  # noqa: E402
from kvstow.serve.budget import free_memory  # noqa: E402

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SCHEMES = [
    Scheme.parse(text)
    for text in ("off", "affine:8", "affine:4", "turbo:k8v3", "turbo:k8v4", "turbo:k4v3")
]
STEP_TOKENS = 256  # by which caches grow; no turn below grows one after the first
NOISE_TOKENS = 4096  # repeated where a cache holds more: drawing takes several times their bytes
RESERVE = 0.06  # of what is free: mlx itself stays below 0.95 of a GPU's memory


@dataclass(frozen=True)
class Cell:
    """Rows of a batch, and the tokens that each has cached."""

    batch: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        batch, _, tokens = text.partition("x")
        return cls(int(batch), int(tokens))


CELLS = [
    *(Cell(batch, n) for batch in (1, 8) for n in (4096, 32768, 131072)),
    *(Cell(32, n) for n in (4096, 8192, 32768)),
]


def random_llama(dtype: mx.Dtype) -> Any:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA_8B))
    model.set_dtype(dtype)
    parameters: Any = tree_flatten(model.parameters())
    for _, weights in parameters:
        mx.eval(weights)  # one by one: they are drawn in float32
    return model


def needed_bytes(model: Any, shape: ModelShape, scheme: Scheme, cell: Cell) -> int:
    """Weights, the cache with room to grow, and what filling or growing one layer takes."""
    parameters: Any = tree_flatten(model.parameters())
    weights = sum(array.nbytes for _, array in parameters)
    room = cell.tokens + 2 * STEP_TOKENS
    cache = cell.batch * room * bytes_per_token(shape, scheme)
    one_layer = cell.batch * room * bytes_per_token(shape, Off()) // len(shape.layers)
    logits = 4 * cell.batch * shape.vocab_size * 4
    return int(weights + cache + 2 * one_layer + logits)


def filled(model: Any, cell: Cell, dtype: mx.Dtype) -> list[Any]:
    """The prompt cache of `model`, as it is attached, holding noise."""
    shape = read_shape(model)
    cache = make_prompt_cache(model)
    for i, layer in enumerate(shape.layers):
        of_layer = (cell.batch, layer.n_kv_heads, cell.tokens, layer.key_dim)
        cache[i].update_and_fetch(*(noise(of_layer, dtype) for _ in "kv"))
        mx.eval(cache[i].state)
        mx.clear_cache()
    return cache


def noise(shape: tuple[int, int, int, int], dtype: mx.Dtype) -> mx.array:
    _, heads, tokens, width = shape
    drawn = mx.random.normal((1, heads, min(tokens, NOISE_TOKENS), width), dtype)
    return mx.broadcast_to(drawn[:, :, mx.arange(tokens) % NOISE_TOKENS], shape)


def turn_ms(model: Any, cache: list[Any], batch: int, n: int) -> float:
    """Time of a step; as in mlx-lm, the next graph is built while one computes."""
    token = mx.zeros((batch, 1), mx.int32)
    mx.eval(token)
    begin = time.perf_counter()
    for _ in range(n):
        following = mx.argmax(model(token, cache=cache)[:, -1], axis=-1, keepdims=True)
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        mx.eval(token)
        token = following
    mx.eval(token)
    return 1e3 * (time.perf_counter() - begin) / n


def measure(model: Any, scheme: Scheme, cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    calls = fused.counts()
    with attached(model, scheme, fetch=fetch_of(scheme, options.fetch)) as report:
        cache = filled(model, cell, getattr(mx, options.dtype))
        mx.reset_peak_memory()
        turn_ms(model, cache, cell.batch, options.steps)  # compiles, and grows the caches
        growing = int(mx.get_peak_memory())
        mx.reset_peak_memory()
        ms = [turn_ms(model, cache, cell.batch, options.steps) for _ in range(options.rounds)]
        peak, kv = int(mx.get_peak_memory()), usage(cache)
        # A cache that is not what was asked for would be measured for nothing.
        if not isinstance(scheme, Off) and kv.kv_bytes >= kv.kv_bytes_bf16:
            raise SystemExit(f"{scheme} holds {kv.kv_bytes} bytes, no less than bfloat16")
    step = statistics.median(ms)
    return {
        "fetch": report.fetch,
        "attention_calls": dict(fused.counts() - calls),
        "step_ms": round(step, 4),
        "step_ms_all": [round(x, 4) for x in ms],
        "decode_tokens_per_s": round(cell.batch * 1e3 / step, 2),
        "kv_bytes": kv.kv_bytes,
        "kv_bytes_bf16": kv.kv_bytes_bf16,
        "peak_memory_bytes": peak,
        "peak_memory_bytes_growing": max(peak, growing),
    }


def arm(model: Any, scheme: Scheme, cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, or why not."""
    needed = needed_bytes(model, read_shape(model), scheme, cell)
    row: dict[str, Any] = {"needed_bytes": needed}
    if needed > options.memory_bytes:
        why = f"needs {needed / 1e9:.1f} GB of {options.memory_bytes / 1e9:.1f}"
        return row | {"fits": False, "refused": why}
    row["fits"] = True
    try:
        return row | measure(model, scheme, cell, options)
    except (RuntimeError, ValueError, KvstowError) as error:  # mlx lacks kernels for affine
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return row | {"refused": why}
    finally:
        gc.collect()
        mx.clear_cache()


def longest(model: Any, scheme: Scheme, batch: int, memory_bytes: int) -> Cell:
    """The most tokens of each row, in steps of 4096, that the estimate lets through."""
    shape = read_shape(model)
    tokens = 4096
    while needed_bytes(model, shape, scheme, Cell(batch, tokens + 4096)) <= memory_bytes:
        tokens += 4096
    return Cell(batch, tokens)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="llama8b", help="llama8b, or what kvstow generate takes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--schemes", nargs="+", type=Scheme.parse, default=SCHEMES)
    parser.add_argument("--cells", nargs="*", type=Cell.parse, default=CELLS, help="BATCHxTOKENS")
    parser.add_argument("--longest", nargs="*", type=Scheme.parse, default=[], help="schemes")
    parser.add_argument("--longest-batch", type=int, default=8)
    parser.add_argument("--fetch", choices=["auto", "deferred", "fused"], default="auto")
    parser.add_argument("--steps", type=int, default=8, help="of a turn; a turn is timed as one")
    parser.add_argument("--rounds", type=int, default=5, help="turns, after one that warms up")
    parser.add_argument("--memory-bytes", type=int, help="of the device, where mlx does not say")
    options = parser.parse_args()
    if options.steps * (options.rounds + 1) >= STEP_TOKENS:
        parser.error(f"--steps times --rounds and one must stay under {STEP_TOKENS}")
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output must be in a directory that exists, got {options.output}")
    if options.memory_bytes is None:
        if (free := free_memory()) is None:
            parser.error("mlx does not say how much memory this device has: give --memory-bytes")
        options.memory_bytes = int((1 - RESERVE) * free)
    return options


def rows(model: Any, cell: Cell, schemes: list[Scheme], options: argparse.Namespace) -> Any:
    """One of each scheme, with its ratios in this run."""
    found = {str(scheme): arm(model, scheme, cell, options) for scheme in schemes}
    ms = {name: row.get("step_ms") for name, row in found.items()}
    for name, row in found.items():
        mine = ms[name]
        yield {
            "bench": "end_to_end",
            "model": options.model,
            "dtype": options.dtype,
            "batch": cell.batch,
            "tokens": cell.tokens,
            "scheme": name,
            "longest": False,
            "refused": None,
            **row,
            "vs_off": round(ms["off"] / mine, 3) if mine and ms.get("off") else None,
            "vs_affine8": round(ms["affine:8"] / mine, 3) if mine and ms.get("affine:8") else None,
            "memory_limit_bytes": options.memory_bytes,
        }


def main() -> None:
    options = parsed()
    dtype = getattr(mx, options.dtype)
    if options.model == "llama8b":
        model = random_llama(dtype)
    else:
        model, _ = load(options.model, dtype=options.dtype)
    runs = [(cell, options.schemes, False) for cell in options.cells]
    for scheme in options.longest:
        cell = longest(model, scheme, options.longest_batch, options.memory_bytes)
        runs.append((cell, [scheme], True))
    about = environment(" ".join(["python", *sys.argv]), BLAS)
    for cell, schemes, is_longest in runs:
        for row in rows(model, cell, schemes, options):
            said = row["refused"] or f"{row['step_ms']:9.3f} ms {row['vs_off']}x {row['fetch']}"
            print(f"{cell.batch:3} x {cell.tokens:7} {row['scheme']:12} {said}", flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    print(json.dumps({**row, "longest": is_longest, **about}), file=file)


if __name__ == "__main__":
    main()

"""Time and peak memory of attention of a chunk of a prompt over a long packed cache.

    python benchmarks/bench_prefill.py --output benchmarks/results/prefill.jsonl
    python benchmarks/bench_prefill.py --dtype bfloat16 --head-dim 128 --queries 512 \\
        --tokens 16384 65536 131072 --output benchmarks/results/prefill.jsonl

One layer; the queries are the last tokens of the cache, causal. Every way has the same packed
cache; `decode` decodes all of it and hands it to mlx's attention, and the others are compared with
it; `kernel` runs on CUDA. Ways run in turns and medians are taken. A way whose output differs from
attention over the decoded cache in float32 is an error, never a row.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402

from kvstow.attention import tiled  # noqa: E402
from kvstow.attention.mlx import decode_window  # noqa: E402
from kvstow.attention.window import PackedWindow  # noqa: E402
from kvstow.codec import mlx as codec  # noqa: E402
from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.kernels import mlx as kernels  # noqa: E402
from kvstow.kernels.calls import Scores  # noqa: E402
from kvstow.scheme import Scheme, Turbo  # noqa: E402

SHAPES = {64: (9, 3), 128: (32, 8), 256: (8, 4)}  # head_dim: query heads, KV heads
TOLERANCE = {
    mx.float32: 1e-3 if codec.on_gpu() else 1e-5,
    mx.bfloat16: 1e-2,
}  # norm of the error over norm of the output
STEP_TOKENS = 4096  # encoded at a time


def _host(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    scale = queries.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")


def _eager(queries: mx.array, window: PackedWindow) -> mx.array:
    return _host(queries, *decode_window(window, queries.dtype, rotated=False))


def _decode(queries: mx.array, window: PackedWindow) -> mx.array:
    output = _host(queries, *decode_window(window, queries.dtype, rotated=True))
    return codec.unrotate(output).astype(queries.dtype)


def _tiled(queries: mx.array, window: PackedWindow) -> mx.array:
    output = tiled.attend(queries, window, scale=queries.shape[-1] ** -0.5, mask="causal")
    return codec.unrotate(output).astype(queries.dtype)


def _kernel(queries: mx.array, window: PackedWindow) -> mx.array:
    planes, scores = (window.keys, window.values), Scores(queries.shape[-1] ** -0.5)
    return kernels.attend(queries, planes, window.n_tokens, window.scheme, scores)


WAYS: dict[str, Callable[[mx.array, PackedWindow], mx.array]] = {
    "decode": _decode,
    "eager": _eager,
    "tiled": _tiled,
}
if mx.cuda.is_available() and codec.on_gpu():
    WAYS["kernel"] = _kernel


def made_window(h: int, n_tokens: int, d: int, dtype: mx.Dtype, scheme: Turbo) -> PackedWindow:
    """Random tokens, encoded some at a time: encoding holds many times their bytes."""
    parts = []
    for at in range(0, n_tokens, STEP_TOKENS):
        shape = (1, h, min(STEP_TOKENS, n_tokens - at), d)
        keys, values = (mx.random.normal(shape).astype(dtype) for _ in "kv")
        k = codec.encode_keys(keys, bits=scheme.key_bits, guard=True)
        v = codec.encode_values(values, bits=scheme.value_bits, guard=True)
        mx.eval(k, v)
        parts.append((k, v))
    keys, values = (
        type(of_kind[0])(*(mx.concatenate(list(p), axis=2) for p in zip(*of_kind, strict=True)))
        for of_kind in zip(*parts, strict=True)
    )
    mx.eval(keys, values)
    return PackedWindow(keys, values, n_tokens, scheme)


def check(name: str, run: Callable[[], mx.array], want: mx.array, dtype: mx.Dtype) -> None:
    off = run().astype(mx.float32) - want
    error = float(mx.linalg.norm(off.reshape(-1)) / mx.linalg.norm(want.reshape(-1)))
    if not error <= TOLERANCE[dtype]:
        raise SystemExit(f"{name} is off by {error:.1e}")


def measured(
    runs: Mapping[str, Callable[[], mx.array]], rounds: int
) -> dict[str, tuple[float, int]]:
    """Median ms and greatest peak bytes of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks = dict.fromkeys(runs, 0)
    for _ in range(rounds + 1):
        for name, run in runs.items():
            mx.synchronize()
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            begin = time.perf_counter()
            mx.eval(run())
            times[name].append(1e3 * (time.perf_counter() - begin))
            peaks[name] = max(peaks[name], mx.get_peak_memory() - before)
    return {name: (statistics.median(times[name][1:]), peaks[name]) for name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--queries", type=int, nargs="+", default=[256, 512, 2048])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--head-dim", type=int, nargs="+", choices=SHAPES, default=[64, 128])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--scheme", default="turbo:k8v3")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    scheme, dtype = Scheme.parse(options.scheme), getattr(mx, options.dtype)
    if not isinstance(scheme, Turbo):
        parser.error(f"--scheme must be a turbo scheme, got {scheme}")
    for head_dim in options.head_dim:
        n_heads, n_kv_heads = SHAPES[head_dim]
        for n_tokens in options.tokens:
            mx.random.seed(0)
            window = made_window(n_kv_heads, n_tokens, head_dim, dtype, scheme)
            for n_queries in options.queries:
                queries = mx.random.normal((1, n_heads, n_queries, head_dim)).astype(dtype)
                want = _decode(queries.astype(mx.float32), window)
                mx.eval(queries, want)
                runs = {way: partial(WAYS[way], queries, window) for way in options.way}
                for way, run in runs.items():
                    check(way, run, want, dtype)
                found = measured(runs, options.rounds)
                decode_ms = found["decode"][0] if "decode" in found else None
                for way, (ms, peak_bytes) in found.items():
                    row: dict[str, Any] = {
                        "bench": "prefill",
                        "scheme": str(scheme),
                        "way": way,
                        "head_dim": head_dim,
                        "heads": [n_heads, n_kv_heads],
                        "tokens": n_tokens,
                        "queries": n_queries,
                        "dtype": options.dtype,
                        "median_ms": round(ms, 3),
                        "vs_decode": decode_ms and round(decode_ms / ms, 3),
                        "peak_bytes": peak_bytes,
                        **environment(" ".join(["python", *sys.argv]), BLAS),
                    }
                    print(
                        f"{head_dim:4} {n_tokens:7} {n_queries:5} {way:7} {ms:10.2f} ms "
                        f"{row['vs_decode']}x {peak_bytes / 1e6:9.1f} MB"
                    )
                    if options.output is not None:
                        with options.output.open("a") as file:
                            print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()

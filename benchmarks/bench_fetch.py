"""Time of one decode attention over a cache: every width, every fetch path, against the host.

    python benchmarks/bench_fetch.py --output benchmarks/results/fetch.jsonl

One layer, one query token; arms run in turns and medians are taken. An
arm whose output differs from attention over its own decoded cache is an error,
never a row. On a GPU calls take turns with as many copies of the cache as exceed
256 MB, so that it is read from memory and not from the L2 cache, and as many calls
as a model has layers are evaluated at once.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_lm.models.base import quantized_scaled_dot_product_attention  # noqa: E402

from kvstow.attention.mlx import attend, decode_window  # noqa: E402
from kvstow.attention.window import PackedWindow  # noqa: E402
from kvstow.codec import mlx as codec  # noqa: E402
from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.kernels import backend as kernels  # noqa: E402
from kvstow.scheme import KEY_BITS, VALUE_BITS, Turbo  # noqa: E402

SHAPES = {64: (9, 3), 128: (32, 8)}  # head_dim: query heads, KV heads
TOLERANCE = {mx.float32: 1e-4, mx.bfloat16: 3e-2}
ON_GPU = mx.default_device().type == mx.DeviceType.gpu
N_LAYERS = 32 if ON_GPU else 1
BEYOND_L2_BYTES = 256e6


def packed_window(keys: mx.array, values: mx.array, scheme: Turbo) -> PackedWindow:
    if ON_GPU:  # the same bytes, without temporaries of many gigabytes
        packed_keys, packed_values = kernels.encode(keys, values, scheme)
    else:
        packed_keys = codec.encode_keys(keys, bits=scheme.key_bits, guard=True)
        packed_values = codec.encode_values(values, bits=scheme.value_bits, guard=True)
    mx.eval(packed_keys, packed_values)
    return PackedWindow(packed_keys, packed_values, keys.shape[2], scheme)


def eager(queries: mx.array, window: PackedWindow, scale: float) -> mx.array:
    keys, values = decode_window(window, queries.dtype, rotated=False)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)


def _deferred(queries: mx.array, window: PackedWindow, scale: float) -> mx.array:
    return attend(queries, window, scale=scale)


def _fused(queries: mx.array, window: PackedWindow, scale: float) -> mx.array:
    planes = window.keys, window.values
    scores = kernels.Scores(scale)
    return kernels.attend(queries, planes, window.n_tokens, window.scheme, scores)


WAYS = {"eager": eager, "deferred": _deferred, "fused": _fused}


def arms(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    schemes: list[Turbo],
    fetches: list[str],
) -> dict[tuple[str, str], Callable[[int], Any]]:
    scale = queries.shape[-1] ** -0.5
    plain = copies((keys, values))
    affine8 = copies(tuple(mx.quantize(x, group_size=64, bits=8) for x in (keys, values)))

    def off(layer: int) -> Any:
        k, v = plain[layer % len(plain)]
        return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale)

    def affine(layer: int) -> Any:
        # A fresh array each time: mlx-lm scales its queries in place.
        k, v = affine8[layer % len(affine8)]
        return quantized_scaled_dot_product_attention(
            queries + 0, k, v, scale=scale, mask=None, group_size=64, bits=8
        )

    runs: dict[tuple[str, str], Callable[[int], Any]] = {("off", "host"): off}
    try:
        mx.eval(affine(0))
        runs["affine:8", "host"] = affine
    except RuntimeError as error:  # mlx's CUDA back-end lacks some shapes
        print(f"affine:8 does not run here: {error}", file=sys.stderr)
    for scheme in schemes:
        window = packed_window(keys, values, scheme)
        decoded = decode_window(window, mx.float32, rotated=False)
        want = mx.fast.scaled_dot_product_attention(
            queries.astype(mx.float32), *decoded, scale=scale
        )
        windows = [
            PackedWindow(k, v, window.n_tokens, scheme)
            for k, v in copies((window.keys, window.values))
        ]
        for fetch in fetches:
            run = WAYS[fetch]
            got = run(queries, window, scale)
            worst = float(mx.abs(got.astype(mx.float32) - want).max())
            if not worst <= TOLERANCE[queries.dtype]:
                raise SystemExit(f"{scheme} {fetch} is off by {worst}")
            runs[str(scheme), fetch] = partial(_of_layer, run, queries, windows, scale)
    return runs


def copies(arrays: Any) -> list[Any]:
    """As many copies of a tree of arrays as do not fit in a cache; on a CPU itself alone."""
    leaves: Any = tree_flatten(arrays)
    n_bytes = sum(array.nbytes for _, array in leaves)
    n = min(N_LAYERS, 1 + int(BEYOND_L2_BYTES // n_bytes))
    made = [arrays, *(tree_map(lambda x: x + 0, arrays) for _ in range(n - 1))]
    mx.eval(made)
    return made


def _of_layer(run: Any, queries: mx.array, windows: list[Any], scale: float, layer: int) -> Any:
    return run(queries, windows[layer % len(windows)], scale)


def medians_ms(runs: dict[tuple[str, str], Callable[[int], Any]], rounds: int) -> dict[Any, float]:
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            mx.synchronize()
            begin = time.perf_counter()
            mx.eval([run(layer) for layer in range(N_LAYERS)])
            times[name].append(1e3 * (time.perf_counter() - begin) / N_LAYERS)
    return {name: statistics.median(t[2:]) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--head-dim", type=int, nargs="+", choices=SHAPES, default=[*SHAPES])
    ways = [way for way in WAYS if ON_GPU or way != "fused"]
    parser.add_argument("--fetch", nargs="+", choices=ways, default=ways)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--all", action="store_true", help="every width pair")
    options = parser.parse_args()
    pairs = [(8, 3), (4, 3)] if ON_GPU else [(8, 3), (8, 4), (4, 3)]
    if options.all:
        pairs = [(k, 3) for k in KEY_BITS] + [(8, v) for v in VALUE_BITS if v != 3]
    dtype = getattr(mx, options.dtype)
    for head_dim in options.head_dim:
        n_heads, n_kv_heads = SHAPES[head_dim]
        for n_tokens in options.tokens:
            mx.random.seed(0)
            shape = (options.batch, n_kv_heads, n_tokens, head_dim)
            keys, values = (mx.random.normal(shape).astype(dtype) for _ in "kv")
            queries = mx.random.normal((options.batch, n_heads, 1, head_dim)).astype(dtype)
            schemes = [Turbo(k, v) for k, v in pairs]
            runs = arms(queries, keys, values, schemes, options.fetch)
            found = medians_ms(runs, options.rounds)
            affine_ms = found.get(("affine:8", "host"))
            for (scheme, fetch), ms in found.items():
                row = {
                    "bench": "fetch",
                    "scheme": scheme,
                    "fetch": fetch,
                    "head_dim": head_dim,
                    "heads": [n_heads, n_kv_heads],
                    "batch": options.batch,
                    "tokens": n_tokens,
                    "dtype": options.dtype,
                    "median_ms": round(ms, 4),
                    "vs_off": round(found["off", "host"] / ms, 3),
                    "vs_affine8": round(affine_ms / ms, 3) if affine_ms else None,
                    **environment(" ".join(["python", *sys.argv]), BLAS),
                }
                line = json.dumps(row)
                print(
                    f"{head_dim:4} {n_tokens:7} {scheme:12} {fetch:9} {ms:9.3f} ms {row['vs_off']}x"
                )
                if options.output is not None:
                    with options.output.open("a") as file:
                        print(line, file=file)


if __name__ == "__main__":
    main()

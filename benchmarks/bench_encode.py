"""Time and error of the encoder options: a prompt and one token, on normal keys and values.

    python benchmarks/bench_encode.py --output benchmarks/results/encode.jsonl

An arm is keys and values under one scheme, as a cache encodes them. Arms run in turns and
medians are taken, of the time passed and of the processor time: beside other programs only
the second is the encoder's own. An arm whose bytes differ from those of the numpy definition is an
error, never a row. Errors are mean squares over elements of unit variance.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from kvstow.codec import mlx as codec  # noqa: E402
from kvstow.codec import reference  # noqa: E402
from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.scheme import KEY_BITS, VALUE_BITS, Turbo  # noqa: E402

SHAPES = ((3, 2048, 64), (8, 512, 128), (3, 1, 64), (8, 1, 128))  # KV heads, tokens, head_dim
OPTIONS: tuple[dict[str, bool], ...] = ({}, {"search": True})


def encode(module: Any, keys: Any, values: Any, scheme: Turbo) -> Any:
    return (
        module.encode_keys(keys, bits=scheme.key_bits, guard=True, search=scheme.search),
        module.encode_values(values, bits=scheme.value_bits, guard=True, search=scheme.search),
    )


def errors(keys: np.ndarray, values: np.ndarray, scheme: Turbo) -> tuple[float, float]:
    """Mean squared error of keys and of values.

    Raises:
        SystemExit: If the bytes are not those of the definition.
    """
    want = encode(reference, keys, values, scheme)
    got = encode(codec, mx.array(keys), mx.array(values), scheme)
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        if np.array(a).tobytes() != b.tobytes():
            raise SystemExit(f"{scheme} differs from the definition")
    decoded = (
        reference.decode_keys(want[0], bits=scheme.key_bits),
        reference.decode_values(want[1], bits=scheme.value_bits, head_dim=values.shape[-1]),
    )
    wide = (x.astype(np.float64) for x in decoded)
    return float(np.mean((next(wide) - keys) ** 2)), float(np.mean((next(wide) - values) ** 2))


def medians_ms(
    keys: mx.array, values: mx.array, arms: list[Turbo], rounds: int
) -> list[tuple[float, float]]:
    """Of each arm, the time passed and the processor time."""
    # One token takes as long as the clock's own noise: several layers' worth are timed.
    repeats = 1 if keys.shape[2] > 1 else 30
    times: list[list[tuple[float, float]]] = [[] for _ in arms]
    for _ in range(rounds + 2):
        for arm, taken in zip(arms, times, strict=True):
            mx.synchronize()
            begin = time.perf_counter(), time.process_time()
            mx.eval([encode(codec, keys, values, arm) for _ in range(repeats)])
            end = time.perf_counter(), time.process_time()
            passed, used = (1e3 * (b - a) / repeats for a, b in zip(begin, end, strict=True))
            taken.append((passed, used))
    halves = ([list(half) for half in zip(*taken[2:], strict=True)] for taken in times)
    return [(statistics.median(passed), statistics.median(used)) for passed, used in halves]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    pairs = [(8, 3)] + [(8, v) for v in VALUE_BITS if v != 3] + [(k, 3) for k in KEY_BITS if k < 8]
    for n_heads, n_tokens, head_dim in SHAPES:
        rng = np.random.default_rng(0)
        keys, values = rng.standard_normal((2, 1, n_heads, n_tokens, head_dim), np.float32)
        for pair in pairs if n_tokens > 1 else pairs[:1]:
            arms = [Turbo(*pair, **chosen) for chosen in OPTIONS]
            found = [errors(keys, values, arm) for arm in arms]
            taken = medians_ms(mx.array(keys), mx.array(values), arms, options.rounds)
            for arm, error, (ms, cpu_ms) in zip(arms, found, taken, strict=True):
                row = {
                    "bench": "encode",
                    "scheme": str(arm),
                    "kv_heads": n_heads,
                    "tokens": n_tokens,
                    "head_dim": head_dim,
                    "dtype": "float32",
                    "median_ms": round(ms, 4),
                    "cpu_ms": round(cpu_ms, 4),
                    "vs_without": round(ms / taken[0][0], 3),
                    "cpu_vs_without": round(cpu_ms / taken[0][1], 3),
                    "key_mse": error[0],
                    "value_mse": error[1],
                    "key_gain": round(1 - error[0] / found[0][0], 4),
                    "value_gain": round(1 - error[1] / found[0][1], 4),
                    **environment(" ".join(["python", *sys.argv]), BLAS),
                }
                print(
                    f"{n_heads:2} x {n_tokens:4} x {head_dim:3} {arm!s:25} {ms:8.3f} ms "
                    f"{row['vs_without']:6.2f}x  cpu {row['cpu_vs_without']:6.2f}x  "
                    f"gain of keys {row['key_gain']:6.1%}, "
                    f"of values {row['value_gain']:6.1%}"
                )
                if options.output is not None:
                    with options.output.open("a") as file:
                        print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()

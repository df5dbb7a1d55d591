"""Bits that differ between the MLX codec on this machine's device and the definition.

    python benchmarks/check_parity.py --output benchmarks/results/parity.jsonl

Every width and head_dim, parity, guarded and searched, encode and decode, on normal
vectors with outliers, offsets, constants, zeros, tiny and huge ones. One JSON row
per head_dim; exit code 1 if anything differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from kvstow.codec import mlx, reference  # noqa: E402
from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS  # noqa: E402


def vectors(head_dim: int, n_elements: int) -> np.ndarray:
    rng = np.random.default_rng(head_dim)
    n = n_elements // head_dim
    x = rng.standard_normal((n, head_dim)) * np.exp(2 * rng.standard_normal((n, 1)))
    eighth = n // 8
    x[:eighth] += 20 * rng.standard_normal((eighth, 1))
    x[eighth : eighth + 50] = rng.standard_normal((50, 1))
    x[eighth + 50 : eighth + 60] = 0
    x[eighth + 60 : eighth + 100] *= 1e-7
    x[eighth + 100 : eighth + 140] *= 1e7
    x[:, rng.integers(0, head_dim, 3)] *= 15
    return x.astype(np.float32)


def differing(got: Any, want: np.ndarray) -> tuple[int, int]:
    """How many elements differ, of how many; any NaN equals any NaN."""
    mine = np.array(got)
    same = mine == want
    if mine.dtype.kind == "f":
        same |= np.isnan(mine) & np.isnan(want)
    return int((~same).sum()), want.size


def counts(x: np.ndarray) -> dict[str, tuple[int, int]]:
    total = {"encode": (0, 0), "decode": (0, 0)}
    on_device = mx.array(x)

    def add(name: str, got: Any, want: np.ndarray) -> None:
        bad, size = differing(got, want)
        total[name] = (total[name][0] + bad, total[name][1] + size)

    for how in ({"guard": False}, {"guard": True}, {"guard": True, "search": True}):
        for bits in KEY_BITS:
            keys = reference.encode_keys(x, bits=bits, **how)
            for got, want in zip(mlx.encode_keys(on_device, bits=bits, **how), keys, strict=True):
                add("encode", got, want)
            stored = type(keys)(*map(mx.array, keys))
            add(
                "decode", mlx.decode_keys(stored, bits=bits), reference.decode_keys(keys, bits=bits)
            )
        for bits in VALUE_BITS:
            d = x.shape[-1]
            values = reference.encode_values(x, bits=bits, **how)
            for got, want in zip(
                mlx.encode_values(on_device, bits=bits, **how), values, strict=True
            ):
                add("encode", got, want)
            add(
                "decode",
                mlx.decode_values(type(values)(*map(mx.array, values)), bits=bits, head_dim=d),
                reference.decode_values(values, bits=bits, head_dim=d),
            )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--elements", type=int, default=2_000_000)
    options = parser.parse_args()
    differ = 0
    for head_dim in HEAD_DIMS:
        found = counts(vectors(head_dim, options.elements))
        differ += sum(bad for bad, _ in found.values())
        row = {
            "bench": "parity",
            "head_dim": head_dim,
            **{f"{name}_differing": bad for name, (bad, _) in found.items()},
            **{f"{name}_elements": size for name, (_, size) in found.items()},
            **environment(" ".join(["python", *sys.argv]), BLAS),
        }
        print(row, flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                print(json.dumps(row), file=file)
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()

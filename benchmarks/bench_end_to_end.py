"""Decoding speed and peak memory of a whole model, batch by context, under every scheme.

    python benchmarks/bench_end_to_end.py --output benchmarks/results/end_to_end.jsonl

Caches are filled with noise, every layer and row with the same, since what they hold does not
change the speed; ``llama8b`` and ``gemma4b`` have random weights (end_to_end_models.py). All rows
of a batch are as long as each other and share one cache, which is how mlx-lm is fastest without a
scheme: it needs no mask then. Cells whose bytes exceed the memory of the device are rows that say
so; nothing is tried. A scheme that fails on a short cache of the same batch is refused there as it
failed.

Short contexts are bound by a host that others use too. So schemes take turns, round by round, each
with its own cache in memory and alone attached to the model: ``vs_off`` is the median over rounds
of a step's time without a scheme over that with it, in the same round. Where not all fit beside
each other there are groups, each with ``off``, whose row is that of the first.

``--longest`` adds the longest context that the estimate lets through, and decodes there.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

# Arms that take turns launch more graphs than one arm does, and MLX keeps a number of them; making
# dropped ones anew is thought to be what slowed such runs down. Read when MLX is imported.
os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "4000")
BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
from end_to_end_arms import AHEAD, STEP_TOKENS, Arm, Bench, Cell  # noqa: E402
from end_to_end_models import SHAPES, random_model  # noqa: E402

from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.models import load  # noqa: E402
from kvstow.scheme import Off, Scheme  # noqa: E402
from kvstow.serve.budget import free_memory  # noqa: E402

SCHEMES = [
    Scheme.parse(text)
    for text in ("off", "affine:8", "affine:4", "turbo:k8v3", "turbo:k8v4", "turbo:k4v3")
]
RESERVE = 0.06  # of what is free: mlx itself stays below 0.95 of a GPU's memory
CELLS = [
    *(Cell(batch, n) for batch in (1, 8) for n in (4096, 32768, 131072)),
    *(Cell(32, n) for n in (4096, 8192, 32768)),
]


def groups(bench: Bench, cell: Cell, schemes: Sequence[Scheme]) -> list[list[Scheme]]:
    """Which of `schemes` take turns: as many as fit beside each other and `off`.

    One that does not fit beside `off` is alone, as all are where `off` is not asked for.
    """
    off = next((scheme for scheme in schemes if isinstance(scheme, Off)), None)
    beside: list[list[Scheme]] = []
    alone: list[list[Scheme]] = []
    for scheme in schemes:
        if scheme is off:
            continue
        if off is None or not bench.fits([off, scheme], cell):
            alone.append([scheme])
            continue
        room = next((group for group in beside if bench.fits([*group, scheme], cell)), None)
        if room is None:
            beside.append([off, scheme])
        else:
            room.append(scheme)
    if off is not None and not beside:
        alone.append([off])
    return beside + alone


def measure(bench: Bench, cell: Cell, schemes: Sequence[Scheme]) -> dict[str, dict[str, Any]]:
    """What each scheme's row says of its turns, in a group."""
    options = bench.options
    arms = [Arm(bench, scheme, cell) for scheme in schemes]
    for arm in arms:
        arm.attempt(lambda arm=arm: arm.fill(options.steps))  # type: ignore[misc]
    for i in range(options.rounds):
        first = i % len(arms)  # not always the same one after the same other
        for arm in arms[first:] + arms[:first]:
            if not arm.refused:
                arm.attempt(arm.turn)
    ms = {str(arm.scheme): arm.ms for arm in arms if not arm.refused}
    found = {
        name: arm.row()
        | {"vs_off": ratio(ms, "off", name), "vs_affine8": ratio(ms, "affine:8", name)}
        for arm, name in ((arm, str(arm.scheme)) for arm in arms)
    }
    del arms, arm
    gc.collect()
    mx.clear_cache()
    return found


def ratio(ms: dict[str, list[float]], base: str, name: str) -> float | None:
    """The median over rounds of how many times as fast as `base` it is."""
    if base not in ms or name not in ms:
        return None
    pairs = zip(ms[base], ms[name], strict=True)
    return round(statistics.median(theirs / mine for theirs, mine in pairs), 3)


def longest(bench: Bench, scheme: Scheme, batch: int) -> Cell:
    """The most tokens of each row, in steps of 4096, that the estimate lets through."""
    tokens = 4096
    while bench.fits([scheme], Cell(batch, tokens + 4096)):
        tokens += 4096
    return Cell(batch, tokens)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--model", default="llama8b", help=f"{', '.join(SHAPES)}, or what kvstow generate takes"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--schemes", nargs="+", type=Scheme.parse, default=SCHEMES)
    parser.add_argument("--cells", nargs="*", type=Cell.parse, default=CELLS, help="BATCHxTOKENS")
    parser.add_argument("--longest", nargs="*", type=Scheme.parse, default=[], help="schemes")
    parser.add_argument("--longest-batch", type=int, default=8)
    parser.add_argument("--fetch", choices=["auto", "deferred", "fused"], default="auto")
    parser.add_argument("--steps", type=int, default=12, help="of a turn; a turn is timed as one")
    parser.add_argument("--rounds", type=int, default=9, help="turns, after one that warms up")
    parser.add_argument("--memory-bytes", type=int, help="of the device, where mlx does not say")
    options = parser.parse_args()
    if (options.steps + AHEAD) * (options.rounds + 1) >= STEP_TOKENS:
        parser.error(
            f"--steps and {AHEAD}, times --rounds and one, must stay under {STEP_TOKENS}, "
            f"got {options.steps} and {options.rounds}"
        )
    if odd := [cell for cell in options.cells if cell.tokens % STEP_TOKENS]:
        parser.error(
            f"--cells must hold multiples of {STEP_TOKENS} tokens, since caches that are not full "
            f"grow later than in the first turn, got {odd[0].batch}x{odd[0].tokens}"
        )
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output must be in a directory that exists, got {options.output}")
    if options.memory_bytes is None:
        if (free := free_memory()) is None:
            parser.error("mlx does not say how much memory this device has: give --memory-bytes")
        options.memory_bytes = int((1 - RESERVE) * free)
    return options


def rows(bench: Bench, cell: Cell, schemes: Sequence[Scheme]) -> Iterator[dict[str, Any]]:
    """One of each scheme."""
    found: dict[str, dict[str, Any]] = {}
    limit = bench.options.memory_bytes
    fitting = [scheme for scheme in schemes if bench.fits([scheme], cell)]
    for scheme in fitting:
        if why := bench.refusal(scheme, cell):
            found[str(scheme)] = {"refused": why}
    for group in groups(bench, cell, [s for s in fitting if str(s) not in found]):
        found = measure(bench, cell, group) | found
    for scheme in schemes:
        needed = bench.needed_bytes([scheme], cell)
        why = f"needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f}"
        yield {
            "bench": "end_to_end",
            "model": bench.options.model,
            "dtype": bench.options.dtype,
            "batch": cell.batch,
            "tokens": cell.tokens,
            "scheme": str(scheme),
            "longest": False,
            "refused": None if scheme in fitting else why,
            "needed_bytes": needed,
            "fits": scheme in fitting,
            "vs_off": None,
            "vs_affine8": None,
            "memory_limit_bytes": limit,
            **found.get(str(scheme), {}),
        }


def main() -> None:
    options = parsed()
    started = time.perf_counter()
    dtype = getattr(mx, options.dtype)
    if options.model in SHAPES:
        model = random_model(options.model, dtype)
    else:
        model, _ = load(options.model, dtype=options.dtype)
    bench = Bench(model, options)
    runs = [(cell, options.schemes, False) for cell in options.cells]
    for scheme in options.longest:
        cell = longest(bench, scheme, options.longest_batch)
        runs.append((cell, [scheme], True))
    about = environment(" ".join(["python", *sys.argv]), BLAS)
    for cell, schemes, is_longest in runs:
        for row in rows(bench, cell, schemes):
            said = row["refused"] or f"{row['step_ms']:9.3f} ms {row['vs_off']}x {row['fetch']}"
            print(f"{cell.batch:3} x {cell.tokens:7} {row['scheme']:12} {said}", flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    print(json.dumps({**row, "longest": is_longest, **about}), file=file)
        print(f"# {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

# Arms that take turns launch more graphs than one arm does, and MLX keeps a number of them; making
# dropped ones anew is thought to be what slowed such runs down. Read when MLX is imported.
os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "4000")
BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
from end_to_end_models import SHAPES, random_model  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from kvstow.attention import fused  # noqa: E402
from kvstow.capacity import ModelShape, bytes_per_token  # noqa: E402
from kvstow.errors import KvstowError  # noqa: E402
from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.integrations import attach, usage  # noqa: E402
from kvstow.integrations.mlx_lm import attachment, read_shape, restore  # noqa: E402
from kvstow.integrations.report import fetch_of  # noqa: E402
from kvstow.models import load  # noqa: E402
from kvstow.scheme import Off, Scheme  # noqa: E402
from kvstow.serve.budget import free_memory  # noqa: E402

SCHEMES = [
    Scheme.parse(text)
    for text in ("off", "affine:8", "affine:4", "turbo:k8v3", "turbo:k8v4", "turbo:k4v3")
]
STEP_TOKENS = 256  # by which caches grow; no turn below grows one after the first
AHEAD = 2  # steps of a turn before its clock starts: one that has ended, one that computes
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


def needed_bytes(model: Any, shape: ModelShape, schemes: Iterable[Scheme], cell: Cell) -> int:
    """Weights, a cache of each scheme with room to grow, and what growing its layers takes.

    MLX grows a layer while it holds another: two at a time, in the bytes of the scheme. Where no
    kernel attends to what is stored, a step decodes a layer instead, which takes more.
    """
    parameters: Any = tree_flatten(model.parameters())
    weights = sum(array.nbytes for _, array in parameters)
    of_rows = cell.batch * (cell.tokens + 2 * STEP_TOKENS)
    layers = max(1, len(shape.of_kind("full", "plain")))
    caches = [of_rows * bytes_per_token(shape, scheme) for scheme in schemes]
    decoded = of_rows * bytes_per_token(shape, Off()) if fused.why_no_device() else 0
    logits = 4 * cell.batch * shape.vocab_size * 4
    return int(weights + sum(caches) + 2 * max(*caches, decoded) // layers + logits)


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

    def needed(self, schemes: Iterable[Scheme], cell: Cell) -> int:
        """See `needed_bytes`."""
        return needed_bytes(self.model, self.shape, schemes, cell)

    def fits(self, schemes: Iterable[Scheme], cell: Cell) -> bool:
        """Whether these fit beside each other."""
        return bool(self.needed(schemes, cell) <= self.options.memory_bytes)

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


def longest(model: Any, scheme: Scheme, batch: int, memory_bytes: int) -> Cell:
    """The most tokens of each row, in steps of 4096, that the estimate lets through."""
    shape = read_shape(model)
    tokens = 4096
    while needed_bytes(model, shape, [scheme], Cell(batch, tokens + 4096)) <= memory_bytes:
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
        needed = bench.needed([scheme], cell)
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
        cell = longest(model, scheme, options.longest_batch, options.memory_bytes)
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

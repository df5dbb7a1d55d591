"""How far the kernels are from the definition on this machine's GPU.

    python benchmarks/check_kernels.py --output benchmarks/results/kernels_parity.jsonl

Encoder: bits that differ from `codec.reference`, on normal vectors with outliers, offsets,
constants, zeros, tiny and huge ones and NaN. Attention: the error relative to attention in
float64 over the cache as the reference decodes it, every width pair and head_dim, with rows
that are empty, ragged and start late, where everything outside a row is NaN or noise. Attention
that stores a token of each row first, the last one or one amid the others: elements of that token
that differ, and of its output from attention over planes that have it. One JSON row per head_dim
and kind; exit code 1 if a row is beyond its tolerance.

Inputs are made on the host and copied, so that a tool which watches the kernels alone knows
what was written (`check_sanitizer.py`).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cuda_host import CudaHost, DecodeCall, Planes, dtype_of, torch

from kvstow.codec import reference
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.evaluate.environment import commit
from kvstow.kernels import prefill
from kvstow.kernels.specialise import DTYPES, Dtype, EncodeKernel
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, Turbo

# Relative error (norm of the difference over norm of the output) by dtype of the output.
# float32: queries become integers of 14 bits and weights float16.
TOLERANCE = {"float32": 1e-3, "float16": 1.2e-3, "bfloat16": 4e-3}
# Query heads of a KV head and query tokens, by quads of rows of the kernel they ask for.
PROMPT = 0
GROUPS = {
    1: [(1, 1), (3, 1), (4, 1), (1, 4), (2, 2)],
    2: [(5, 1), (7, 1), (8, 1), (1, 8), (4, 2), (2, 3)],
    4: [(12, 1), (15, 1), (16, 1), (4, 4), (3, 5), (2, 8)],
    8: [(16, 2), (7, 3), (4, 8), (5, 6)],
    PROMPT: [(3, 61), (1, 9), (4, 130)],
}
BATCH, N_KV_HEADS, CAPACITY = 5, 2, 768
# An empty row comes first and a full one last, where what is read outside leaves the planes.
STARTS, LENGTHS = (0, 3, 37, 700, 0), (0, 4, 419, 731, CAPACITY)
EXACT = BATCH, N_KV_HEADS, 1  # of a token that is not stored yet
AMID = 413  # where one comes to be in a row that has it, as in a sliding window


def vectors(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Float32 vectors, ordinary and degenerate."""
    rng = np.random.default_rng(seed)
    head_dim = shape[-1]
    x = rng.standard_normal((int(np.prod(shape[:-1])), head_dim))
    x *= np.exp(2 * rng.standard_normal((len(x), 1)))
    part = len(x) // 16
    x[:part] += 20 * rng.standard_normal((part, 1))
    x[part : 2 * part] = rng.standard_normal((part, 1))  # constant
    x[2 * part : 2 * part + 9] = 0
    x[3 * part : 4 * part] *= 10.0 ** rng.uniform(-9, 9, (part, 1))
    x[4 * part : 4 * part + 9] *= 1e25
    x[5 * part, 3] = np.nan
    x[5 * part + 1, 7] = np.inf
    x[:, rng.integers(0, head_dim, 3)] *= 15
    return rng.permuted(x, axis=0).astype(np.float32).reshape(shape)


def differing(got: Any, want: np.ndarray) -> int:
    """How many elements differ; any NaN equals any NaN."""
    mine = got.cpu().numpy()
    same = mine == want
    if mine.dtype.kind == "f":
        same |= np.isnan(mine) & np.isnan(want)
    return int((~same).sum())


def check_encoder(host: CudaHost, head_dim: int, *, sample: bool) -> Iterator[dict[str, Any]]:
    """Every width, element type and kind of encoder: elements stored, and how many differ."""
    pairs = [(8, 2), (5, 3), (4, 4), (2, 5), (8, 8)]
    options = (False, False), (True, False), (True, True)  # guard, search
    kinds = [(dtype, *option) for dtype in DTYPES for option in options]
    if sample:
        kinds = [(dtype, *option) for dtype, option in zip(DTYPES, options, strict=True)]
    host.compile(EncodeKernel(head_dim, *p, d, g, s) for p in pairs for d, g, s in kinds)
    x = torch.tensor(vectors((2, 3, 101 if sample else 701, head_dim), head_dim))
    for dtype, guard, search in kinds:
        on_host = x.to(getattr(torch, dtype))
        keys, values = on_host.cuda(), on_host.roll(1, dims=2).contiguous().cuda()
        k, v = (part.float().cpu().numpy() for part in (keys, values))
        wanted = partial(_encoded, k, v, {"guard": guard, "search": search})
        with ThreadPoolExecutor() as pool:
            references = list(pool.map(wanted, pairs))
        bad = size = 0
        for pair, want in zip(pairs, references, strict=True):
            got = host.encode(keys, values, Turbo(*pair, search=search), guard=guard)
            bad += sum(map(differing, got, want))
            size += sum(plane.size for plane in want)
        kind = {"dtype": dtype, "guard": guard, "search": search}
        yield {**kind, "elements": size, "differing": bad, "ok": not bad}


def _encoded(
    keys: np.ndarray, values: np.ndarray, options: dict[str, bool], pair: tuple[int, int]
) -> tuple[np.ndarray, ...]:
    return (
        *reference.encode_keys(keys, bits=pair[0], **options),
        *reference.encode_values(values, bits=pair[1], **options),
    )


class Cache:
    """Planes of every width for one head_dim, and what they decode to, in float64."""

    def __init__(self, head_dim: int) -> None:
        rng = np.random.default_rng(head_dim)
        shape = BATCH, N_KV_HEADS, CAPACITY, head_dim
        keys = rng.standard_normal(shape) + rng.standard_normal((1, N_KV_HEADS, 1, head_dim))
        values = rng.standard_normal(shape) * rng.uniform(0, 2, (*shape[:3], 1))
        keys, values = keys.astype(np.float32), values.astype(np.float32)
        self.keys, self.values = {}, {}
        for bits in KEY_BITS:
            packed = reference.encode_keys(keys, bits=bits, guard=True)
            self.keys[bits] = packed, _double(reference.decode_keys(packed, bits=bits))
        for bits in VALUE_BITS:
            stored = reference.encode_values(values, bits=bits, guard=True)
            decoded = reference.decode_values(stored, bits=bits, head_dim=head_dim)
            self.values[bits] = stored, _double(decoded)

    def planes(self, scheme: Turbo, inside: np.ndarray) -> Planes:
        """Planes with noise for codes and NaN for scales outside the rows."""
        rng = np.random.default_rng(7)
        keys: PackedKeys = self.keys[scheme.key_bits][0]
        values: PackedValues = self.values[scheme.value_bits][0]
        made = []
        for plane in (*keys, *values):
            noise = rng.integers(-128, 128, plane.shape).astype(plane.dtype)
            if plane.dtype == np.float16:
                noise = np.full_like(plane, np.nan)
            made.append(torch.tensor(np.where(inside[:, None, :, None], plane, noise)).cuda())
        return tuple(made)


def _double(x: np.ndarray) -> Any:
    return torch.tensor(x).cuda().double()


def attention(
    queries: Any,
    keys: Any,
    values: Any,
    rows: tuple[Any, Any],
    window: int = 0,
    sinks: Any = None,
) -> Any:
    """Attention in float64; a query that sees nothing gives zeros."""
    lengths, starts = rows
    n_queries, group = queries.shape[2], queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = queries.double() @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
    token = torch.arange(keys.shape[2], device="cuda")
    high = (lengths[:, None] - n_queries + 1 + torch.arange(n_queries, device="cuda"))[..., None]
    low = starts[:, None, None].expand_as(high)
    if window:
        low = torch.maximum(low, high - window)
    seen = ((token >= low) & (token < high))[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more token, whose value is zero
        scores = torch.cat([scores, sinks.double()[:, None, None].expand_as(scores[..., :1])], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    return torch.softmax(scores, -1).nan_to_num(0) @ values


class Case(NamedTuple):
    """One call of attention and what it was made from."""

    scheme: Turbo
    queries: Any
    window: int
    sinks: Any
    call: DecodeCall


def asked(n: int, scheme: Turbo, *, sample: bool) -> Iterator[tuple[int, Iterable[int]]]:
    """Quads of rows, and which of their groups, that the n-th scheme is run with."""
    if sample:  # over all schemes every group takes its turn
        quads = (1, 2, 4, 8)[n % 4]
        yield quads, [n // 4 % len(GROUPS[quads])]
        yield PROMPT, [n % len(GROUPS[PROMPT])]
        return
    # Every kernel for k8v3; of the others the smallest and one more, by turns.
    more = (2, 4, 8)[(scheme.key_bits + scheme.value_bits) % 3]
    for quads, groups in GROUPS.items():
        if scheme == Turbo(8, 3) or quads in (PROMPT, 1, more):
            yield quads, range(len(groups))


def cases(host: CudaHost, cache: Cache, head_dim: int, *, sample: bool) -> Iterator[Case]:
    """Every width pair, with shapes, splits and windows that take turns."""
    token = np.arange(CAPACITY)
    inside = (token >= np.array(STARTS)[:, None]) & (token < np.array(LENGTHS)[:, None])
    lengths, starts = rows_on_device()
    dtypes = cycle(DTYPES)
    for n, scheme in enumerate(Turbo(k, v) for k in KEY_BITS for v in VALUE_BITS):
        planes = cache.planes(scheme, inside)
        for quads, picked in asked(n, scheme, sample=sample):
            if quads == PROMPT and head_dim not in prefill.HEAD_DIMS:
                continue
            dtype = getattr(torch, next(dtypes))
            for i in picked:
                group, n_queries = GROUPS[quads][i]
                torch.manual_seed(quads + i)
                shape = BATCH, N_KV_HEADS * group, n_queries, head_dim
                queries = (2 * torch.randn(shape)).to(dtype).cuda()
                window, chunk = (0, 0, 37, 300)[i % 4], (None, 256, 10_240)[i % 3]
                sinks = (3 * torch.randn(shape[1])).cuda() if i % 2 else None
                options = {"lengths": lengths, "starts": starts, "window": window, "chunk": chunk}
                call = host.decode(queries, planes, scheme, sinks=sinks, **options)
                yield Case(scheme, queries, window, sinks, call)


def rows_on_device() -> tuple[Any, Any]:
    """Lengths and starts of the rows."""
    return (
        torch.tensor(LENGTHS, dtype=torch.int32, device="cuda"),
        torch.tensor(STARTS, dtype=torch.int32, device="cuda"),
    )


def check_attention(host: CudaHost, head_dim: int, *, sample: bool) -> Iterator[dict[str, Any]]:
    """Every width pair: the worst error over shapes, rows, splits and windows."""
    cache = Cache(head_dim)
    rows = rows_on_device()
    made = list(cases(host, cache, head_dim, sample=sample))
    started = time.perf_counter()
    host.compile(case.call.plan.kernel for case in made)
    print(f"# {head_dim}: compiled in {time.perf_counter() - started:.1f} s", flush=True)
    worst: dict[tuple[str, Dtype], float] = {}
    for case in made:
        keys = cache.keys[case.scheme.key_bits][1]
        values = cache.values[case.scheme.value_bits][1]
        want = attention(case.queries, keys, values, rows, case.window, case.sinks)
        dtype = dtype_of(case.queries)
        for _ in range(2):  # the first call must leave the arrivals at zero
            error = error_of(case.call.run().double(), want)
            if error > TOLERANCE[dtype]:
                name, shape = case.call.plan.kernel.name, tuple(case.queries.shape)
                print("# off:", name, shape, case.window, error, flush=True)
            key = str(case.scheme), dtype
            worst[key] = max(worst.get(key, 0.0), error)
    for (scheme, dtype), error in worst.items():
        yield {"scheme": scheme, "dtype": dtype, "error": error, "ok": error <= TOLERANCE[dtype]}


def check_append(host: CudaHost, head_dim: int, *, sample: bool) -> Iterator[dict[str, Any]]:
    """Every width pair, element types and shapes by turns: elements stored and attended."""
    cache, made = (
        Cache(head_dim),
        list[tuple[Turbo, Dtype, tuple[DecodeCall, DecodeCall], Stored]](),
    )
    token, lengths, starts = np.arange(CAPACITY), *rows_on_device()
    inside = (token >= np.array(STARTS)[:, None]) & (token < np.array(LENGTHS)[:, None])
    groups = [group for quads in (1, 2, 4) for group, n in GROUPS[quads] if n == 1]
    for n, scheme in enumerate(Turbo(k, v) for k in KEY_BITS for v in VALUE_BITS):
        if sample and n % 4:
            continue
        dtype = DTYPES[n % 3]
        exact = [x.to(getattr(torch, dtype)) for x in torch.randn((2, *EXACT, head_dim))]
        k, v = (x.float().numpy() for x in exact)
        wanted = _encoded(k, v, {"guard": True}, scheme.widths)
        at = AMID if n % 8 in (0, 6) else -1
        options = {"lengths": lengths, "starts": starts, "window": (0, 37)[n % 2]}
        options |= {"exact": [x.cuda() for x in exact], "stored": at}
        places = places_of(at)
        for group in groups[n % 2 :: 8 if sample else 2]:
            late = np.array([token == places.get(i, -1) for i in range(BATCH)])
            planes = cache.planes(scheme, inside & ~late)
            shape = BATCH, N_KV_HEADS * group, 1, head_dim
            queries = torch.randn(shape).to(exact[0].dtype).cuda()
            storing = host.decode(queries, planes, scheme, **options)
            after = host.decode(queries, planes, scheme, **options | {"exact": None})
            made.append((scheme, dtype, (storing, after), Stored(planes, wanted, places)))
    host.compile(call.plan.kernel for _, _, calls, _ in made for call in calls)
    for scheme, dtype, (storing, after), stored in made:
        bad = int((storing.run() != after.run()).sum()) + stored.n_wrong()
        kind = {"scheme": str(scheme), "dtype": dtype}
        yield {**kind, "elements": stored.size, "differing": bad, "ok": not bad}


def places_of(at: int) -> dict[int, int]:
    """Where a token comes to be in each row that has that place; -1: in the last one."""
    rows = enumerate(zip(STARTS, LENGTHS, strict=True))
    if at < 0:
        return {i: length - 1 for i, (_, length) in rows if length}
    return {i: at for i, (start, length) in rows if start <= at < length}


class Stored(NamedTuple):
    """Planes, and what a token of each row is to be in them; the tokens, by row."""

    planes: Planes
    wanted: tuple[np.ndarray, ...]
    places: dict[int, int]

    def n_wrong(self) -> int:
        """Elements of these tokens that differ."""
        rows = list(self.places)
        return sum(
            differing(
                torch.stack([plane[i, :, n] for i, n in self.places.items()]), want[rows, :, 0]
            )
            for plane, want in zip(self.planes, self.wanted, strict=True)
        )

    @property
    def size(self) -> int:
        """Elements of these tokens."""
        return sum(want[list(self.places)].size for want in self.wanted)


def error_of(got: Any, want: Any) -> float:
    """Relative error of all, or a quarter of that of the worst row; infinite for NaN."""
    off = got - want
    rows = off.norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-3)
    error = max(float(off.norm() / want.norm()), float(rows.max()) / 4)
    return error if math.isfinite(float(off.norm())) else math.inf


CHECKS = {"encode": check_encoder, "attention": check_attention, "append": check_append}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--sample", action="store_true", help="every width pair, fewer shapes")
    options = parser.parse_args()
    host = CudaHost()
    command = " ".join(["python", *sys.argv])
    about = {"command": command, "commit": commit(), "device": torch.cuda.get_device_name()}
    failed = 0
    for head_dim in options.head_dim:
        for kind, check in CHECKS.items():
            found = list(check(host, head_dim, sample=options.sample))
            failed += sum(not part["ok"] for part in found)
            summary = {"bench": f"kernel_{kind}", "head_dim": head_dim, "parts": found, **about}
            worst = max(float(part.get("error", part.get("differing", 0))) for part in found)
            print(f"{kind:10} {head_dim:4} parts {len(found)} worst {worst:.3g}", flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    print(json.dumps(summary), file=file)
    spilling = {k.name: c.frame_bytes for k, c in host.compiled.items() if c.frame_bytes}
    print(f"{len(host.compiled)} kernels, {host.launches} launches on {about['device']}")
    print(f"with a stack frame: {spilling}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

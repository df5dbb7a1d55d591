"""How equal shares cut rows that differ in length: the device source, run on the CPU."""

import ctypes
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.kernels.arguments import DecodeArgs
from kvstow.kernels.plan import LEAST_CHUNK, Shape, in_shares
from kvstow.kernels.specialise import decode_kernel
from tests.kernels import emulated

pytestmark = pytest.mark.skipif(
    emulated.compiler() is None, reason="needs a g++ that knows float16, and ucontext"
)
KERNEL = decode_kernel((8, 3), 128, "bfloat16", 4, 232_448)
TILE, N_KV_HEADS = KERNEL.tile, 2
FIELDS = ("b", "head", "row_block", "begin", "end", "index", "n_splits")


@dataclass(frozen=True)
class Listing:
    """A kernel of one warp that writes down what each share takes, and what a pause is."""

    file_name = "shares.cuh"
    name = "listing"
    threads = 32
    shared_bytes = 1
    checks = f"""
using Shape = {KERNEL.shape};
static void list(const kvstow::DecodeArgs& args) {{
  kvstow::Share<Shape> share;
  kvstow::Split split;
  int* to = args.arrivals;
  const auto rows = share.find(args);
  while (share.next(args, rows, split))
    if (threadIdx.x == 0) {{
      *to += 1;
      const int fields[] = {{(int)blockIdx.x, {", ".join(f"split.{name}" for name in FIELDS)}}};
      std::memcpy(to + 2 + (*to - 1) * 8, fields, sizeof fields);
    }}
  if (threadIdx.x == 0) to[1] = share.PAUSE;
}}"""

    def call(self, args, _):
        return f"list({args})"


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A function that gives the splits of a plan as dicts, and tiles of a pause."""
    launch = emulated.compile_kernel(Listing(), tmp_path_factory.mktemp("shares"))

    def run(plan, rows, n_queries=1, window=0):
        starts, lengths = (np.array(part, np.int32) for part in zip(*rows, strict=True))
        found = np.zeros(
            2 + 8 * (len(rows) * N_KV_HEADS * plan.row_blocks + plan.grid[0]), np.int32
        )
        args = DecodeArgs(starts=starts.ctypes.data, lengths=lengths.ctypes.data)
        args.arrivals = found.ctypes.data
        args.batch, args.n_kv_heads, args.row_blocks = len(rows), N_KV_HEADS, plan.row_blocks
        args.group, args.n_queries, args.window = plan.group, n_queries, window
        args.length, args.n_splits, args.chunk = int(lengths.max()), plan.n_splits, plan.chunk
        assert launch(ctypes.byref(args), *plan.grid)
        table = found[2:].reshape(-1, 8)[: found[0]].tolist()
        return [dict(zip(("share", *FIELDS), line, strict=True)) for line in table], int(found[1])

    return run


def planned(rows, n_shares, n_queries=1, chunk=LEAST_CHUNK):
    longest = max(length for _, length in rows)
    shape = Shape(len(rows), 4 * N_KV_HEADS, N_KV_HEADS, n_queries, 128, longest, ragged=True)
    return in_shares(shape, KERNEL, n_shares, chunk)


def of_rows(splits):
    """The splits of each row, KV head and block of query rows, in order."""

    def key(split):
        return split["b"], split["head"], split["row_block"]

    ordered = sorted(splits, key=lambda split: (*key(split), split["index"]))
    return {which: list(group) for which, group in groupby(ordered, key)}


row = st.tuples(st.integers(0, 700), st.one_of(st.integers(0, 700), st.integers(0, 40_000)))


@given(
    rows=st.lists(row, min_size=1, max_size=70),
    n_shares=st.sampled_from([1, 2, 7, 132, 300]),
    n_queries=st.sampled_from([1, 3]),
    chunk=st.sampled_from([TILE, LEAST_CHUNK]),
    window=st.sampled_from([0, 0, 100, 5000]),
)
def test_every_token_lies_in_one_split_and_every_split_knows_its_place(
    listed, rows, n_shares, n_queries, chunk, window
):
    plan = planned(rows, n_shares, n_queries, chunk)
    splits, _ = listed(plan, rows, n_queries, window)
    found = of_rows(splits)
    assert len(found) == len(rows) * N_KV_HEADS * plan.row_blocks
    for (b, _, _), own in found.items():
        start, length = rows[b]
        first = max(start, length - n_queries + 1 - window) if window else start
        assert [split["index"] for split in own] == list(range(len(own)))
        assert {split["n_splits"] for split in own} == {len(own)}
        assert len(own) <= plan.n_splits
        assert [split["begin"] for split in own[1:]] == [split["end"] for split in own[:-1]]
        assert own[0]["begin"] == first // TILE * TILE
        assert own[-1]["end"] >= length
        assert len(own) == 1 or all(split["end"] - split["begin"] >= chunk for split in own)


@pytest.mark.parametrize(
    "lengths",
    [
        [2048] * 3 + [131_072] + [2048] * 12,
        [32_768, 2048] * 8,
        [4096] * 17,
        list(range(1000, 65_000, 1000)),
        [100_000, 30_000],
    ],
)
def test_no_share_is_longer_than_another_by_more_than_a_short_split(listed, lengths):
    rows = [(0, length) for length in lengths]
    splits, pause = listed(planned(rows, 132), rows)
    tiles = [0] * 132
    for split in splits:
        tiles[split["share"]] += (split["end"] - split["begin"]) // TILE + pause
    even = sum(tiles) / 132
    assert max(tiles) <= even + pause + LEAST_CHUNK // TILE


@pytest.mark.parametrize("reciprocal_is_off", [-1, 0, 1])  # units in the last place
def test_positions_are_divided_exactly(rng, tmp_path, reciprocal_is_off):
    program = f"""{emulated.emulated("shares.cuh")}
extern "C" int wrong(const int* a, const int* b, int n, int off) {{
  kvstow::reciprocal_is_off = off;
  int found = 0;
  for (int i = 0; i < n; ++i) found += kvstow::quotient(a[i], b[i]) != a[i] / b[i];
  return found;
}}
"""
    library = emulated.compile_program(program, tmp_path, "quotient")
    b = (2 ** rng.uniform(0, 24, 1_000_000)).astype(np.int64)
    quotients = np.minimum((2 ** rng.uniform(0, 20, b.size)).astype(np.int64), 2**30 // b)
    a = np.clip(quotients * b + rng.integers(-1, 2, b.size), 0, 2**30)
    a, b = (np.ascontiguousarray(x, np.int32) for x in (a, b))
    pointers = (ctypes.c_void_p(x.ctypes.data) for x in (a, b))
    assert library.wrong(*pointers, b.size, reciprocal_is_off) == 0

"""Runs kernels on the CPU through ``emulator.h``: the device source itself, without a GPU."""

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvstow.codec.search import key_candidates, value_candidates
from kvstow.codec.tables import BOUNDARIES, CENTROIDS, SIGNS
from kvstow.kernels.arguments import DecodeArgs, EncodeArgs
from kvstow.kernels.plan import Device, Shape, in_shares, plan_decode
from kvstow.kernels.source import cuda_header
from kvstow.kernels.specialise import SHARED_LIMITS, DecodeKernel, EncodeKernel, decode_kernel

EMULATOR = Path(__file__).with_name("emulator.h")
# Compiling takes longer than running, so nothing is optimised.
OPTIONS = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-w"]


@cache
def compiler():
    """The path of a g++ that knows float16 and fibers; None where there is none."""
    path = shutil.which("g++")
    if path is None:
        return None
    needed = "#include <ucontext.h>\n_Float16 number; ucontext_t fiber;\n"
    command = [path, "-x", "c++", "-fsyntax-only", "-"]
    tried = subprocess.run(command, input=needed, text=True, capture_output=True, check=False)
    return None if tried.returncode else path


def compile_kernel(kernel, folder):
    """A function that takes the arguments, blocks along x, y, z."""
    args = "EncodeArgs" if isinstance(kernel, EncodeKernel) else "DecodeArgs"
    program = f"""{emulated(kernel.file_name)}
{kernel.checks}
static kvstow::{args} args;
static void body() {{ {kernel.call("args", "emulator::shared.data()")}; }}
extern "C" bool launch(const kvstow::{args}* given, unsigned x, unsigned y, unsigned z) {{
  args = *given;
  return emulator::launch({{x, y, z}}, {kernel.threads}, {kernel.shared_bytes}, body);
}}
"""
    launch = compile_program(program, folder, kernel.name).launch
    launch.restype = ctypes.c_bool
    return launch


def emulated(file_name):
    """The device source of an op behind the emulator's text."""
    instructions = files("kvstow.kernels").joinpath("cuda", "primitives.cuh").read_text()
    header = cuda_header(file_name)
    own = instructions.replace("#pragma once\n", "")
    assert own in header
    return f'#include "{EMULATOR}"\n{header.replace(own, "")}'


def compile_program(program, folder, name):
    """A library, compiled once for all processes that share the folder."""
    digest = hashlib.sha256(program.encode()).hexdigest()[:16]
    library = folder / f"{name}_{digest}.so"
    if not library.exists():
        own = folder / f"{name}_{digest}_{os.getpid()}"
        source, made = own.with_suffix(".cc"), own.with_suffix(".so")
        source.write_text(program)
        subprocess.run([compiler(), *OPTIONS, str(source), "-o", str(made)], check=True)
        made.replace(library)
    return ctypes.CDLL(str(library))


def codes_of(x, divisor, bits, folder):
    """Codes of float32 numbers, by boundaries times the divisor and by dividing each."""
    program = f"""{emulated("encode.cuh")}
typedef unsigned char Codes[2];
extern "C" void codes(const float* edges, const float* x, int n, float divisor, Codes* found) {{
  kvstow::Boundaries<{bits}> multiplied(edges), plain(edges);
  if (!multiplied.can_multiply(divisor)) return;
  multiplied.multiply(divisor);
  for (int i = 0; i < n; ++i) {{
    found[i][0] = multiplied.code(x[i]);
    found[i][1] = plain.code(x[i] / divisor);
  }}
}}
"""
    library = compile_program(program, folder, f"boundaries_of_{bits}")
    found = np.full((len(x), 2), 255, np.uint8)
    arrays = _address(BOUNDARIES[bits]), _address(x)
    library.codes(
        *map(ctypes.c_void_p, arrays),
        len(x),
        ctypes.c_float(divisor),
        ctypes.c_void_p(_address(found)),
    )
    return found.T


def known_boundaries(bits, folder):
    """Those of a narrow width as they stand in the device source."""
    program = f"""{emulated("encode.cuh")}
extern "C" void edges(float* found) {{
  for (int i = 0; i < {2**bits - 1}; ++i) found[i] = kvstow::Boundaries<{bits}>::narrow_edge(i);
}}
"""
    found = np.full(2**bits - 1, np.nan, np.float32)
    compile_program(program, folder, f"known_{bits}").edges(ctypes.c_void_p(_address(found)))
    return found


def key_codes(dtype, bits, folder):
    """A function that gives words of codes, quick and as defined, and which groups can be quick."""
    program = f"""{emulated("encode.cuh")}
using namespace kvstow;
typedef u32 Words[{bits}];
extern "C" void codes(const void* p, int n, int off, Words* quick, Words* defined, u8* possible) {{
  reciprocal_is_off = off;
  for (int i = 0; i < n; ++i) {{
    const Group<{dtype.upper()}> x(p, 32 * (u64)i);
    float low, high;
    x.extremes(low, high);
    Affine affine = KeyCodes<{bits}>::affine_of(low, high);
    KeyCodes<{bits}>::guard(affine, low, high);
    const QuickCodes<{bits}> codes(affine, low, high);
    BitStream<{bits}> one, other;
    codes.put(one, x, affine);
    KeyCodes<{bits}>::each(x, affine, low, high, [&](int k, u32 code) {{ other.put(k, code); }});
    possible[i] = codes.possible;
    std::memcpy(quick[i], one.words, sizeof(Words));
    std::memcpy(defined[i], other.words, sizeof(Words));
  }}
}}
"""
    library = compile_program(program, folder, f"keys_of_{dtype}_{bits}")

    def codes_of(groups, reciprocal_is_off=0):
        n = len(groups)
        quick, defined = np.empty((2, n, bits), np.uint32)
        possible = np.empty(n, np.uint8)
        found = [ctypes.c_void_p(_address(array)) for array in (quick, defined, possible)]
        library.codes(ctypes.c_void_p(_address(groups)), n, reciprocal_is_off, *found)
        return quick, defined, possible.astype(bool)

    return codes_of


def narrowed(x, dtype):
    """Float32 numbers as elements of a dtype; bfloat16 as its bits."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def attend(queries, planes, widths, folder, **options):
    """Attention of float32 queries over numpy planes ``(b, h, capacity, *)``.

    Options: starts, lengths (int32), sinks (float32), window, chunk, shares, device, exact, plan,
    which is `plan_decode` unless given, and dtype, to which queries and output are rounded.
    """
    b, hq, n_queries, d = queries.shape
    h, capacity = planes[0].shape[1:3]
    ragged = options.get("lengths") is not None
    exact = options.get("exact", (None, None))
    shape = Shape(b, hq, h, n_queries, d, capacity, ragged, "exact" in options)
    # One with little shared memory gets kernels of few warps, which is less to emulate.
    device = options.get("device", Device(86, 1))
    dtype = options.get("dtype", "float32")
    plan = options.get("plan", plan_decode)(shape, widths, dtype, device)
    chunk = options.get("chunk", plan.chunk)
    n_splits = -(-capacity // chunk)
    grid = n_splits, *plan.grid[1:]
    if ragged and isinstance(plan.kernel, DecodeKernel):
        plan = in_shares(shape, plan.kernel, options.get("shares", 5), chunk)
        n_splits, grid = plan.n_splits, plan.grid
    n_rows = b * hq * n_queries
    queries = _stored(queries, dtype)
    output = np.full_like(queries, 77)
    sums = np.full((n_rows, n_splits, d), np.nan, np.float32)
    weights = np.full((n_rows, n_splits, 2), np.nan, np.float32)
    arrivals = np.zeros(b * h * plan.row_blocks, np.int32)
    arrays = [*planes, queries, CENTROIDS[widths[1]], SIGNS[d].astype(np.int8)]
    arrays += [options.get(name) for name in ("sinks", "starts", "lengths")]
    arrays += [output, sums, weights, arrivals, *exact, BOUNDARIES[widths[1]]]
    sizes = b, h, plan.group, n_queries, capacity, capacity, plan.row_blocks
    counts = *sizes, n_splits, chunk, options.get("window", 0), options.get("stored", -1)
    args = DecodeArgs(*map(_address, arrays), *counts, d**-0.5 * math.log2(math.e))
    assert compile_kernel(plan.kernel, folder)(ctypes.byref(args), *grid)
    assert not arrivals.any()
    return _floats(output, dtype)


def _stored(x, dtype):
    """Float32 numbers as a kernel reads them: bfloat16 is the upper half of their bits."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(x, dtype)
    return (x.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def _floats(x, dtype):
    if dtype != "bfloat16":
        return x.astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32)


def store(keys, values, widths, folder, dtype="float32"):
    """Planes ``(n, 1, 1, *)`` of vectors ``(n, d)``, each stored as attention does it.

    Elements of bfloat16 are given as their bits.
    """
    n, d = keys.shape
    kernel = decode_kernel(widths, d, dtype, 1, SHARED_LIMITS[86])
    types = f"{kernel.shape}, kvstow::{dtype.upper()}"
    storing = Storing(f"kvstow::store_token<{types}>(args, b, 0, 0, 0)", 8 * d)
    planes = _planes((n, 1, 1), d, widths)
    args = DecodeArgs(*map(_address, planes))
    signs, boundaries = SIGNS[d].astype(np.int8), BOUNDARIES[widths[1]]  # kept until it has run
    args.signs, args.boundaries = _address(signs), _address(boundaries)
    args.new_keys, args.new_values = _address(keys), _address(values)
    args.batch, args.n_kv_heads, args.capacity = n, 1, 1
    assert compile_kernel(storing, folder)(ctypes.byref(args), 1, 1, 1)
    return planes


@dataclass(frozen=True)
class Storing:
    """A kernel of one warp that stores a token of each row."""

    stores: str
    shared_bytes: int

    file_name = "store.cuh"
    name = "storing"
    threads = 32
    checks = ""

    def call(self, args, _):
        return f"for (int b = 0; b < {args}.batch; ++b) {self.stores}"


def encode(keys, values, widths, folder, **options):
    """Planes of a capacity of 8 more tokens than given.

    Options: position, of the first token, search, and dtype; bfloat16 is given as its bits.
    """
    b, h, n, d = keys.shape
    kb, vb = widths
    planes = _planes((b, h, n + 8), d, widths)
    kernel = EncodeKernel(
        d, kb, vb, options.get("dtype", "float32"), search=options.get("search", False)
    )
    tables = [CENTROIDS[vb], key_candidates().words, value_candidates(vb).words]
    arrays = [keys, values, *planes, SIGNS[d].astype(np.int8), BOUNDARIES[vb], *tables]
    counts = h, n, b * h * n, n + 8, options.get("position", 0)
    args = EncodeArgs(*map(_address, arrays), *counts, h * n * d, n * d, d)
    launch = compile_kernel(kernel, folder)
    assert launch(ctypes.byref(args), kernel.n_blocks(b * h * n), 1, 1)
    return planes


def _planes(lead, head_dim, widths):
    key_bits, value_bits = widths
    dtypes = np.int8 if key_bits == 8 else np.uint8, np.float16, np.float16, np.uint8, np.float16
    groups = head_dim // 32
    row_bytes = head_dim * key_bits // 8, groups, groups, head_dim * value_bits // 8, groups
    return [
        np.full((*lead, width), 77, dtype) for width, dtype in zip(row_bytes, dtypes, strict=True)
    ]


def _address(array):
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data

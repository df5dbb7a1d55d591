"""Runs kernels on the CPU through ``emulator.h``: the device source itself, without a GPU."""

import ctypes
import math
import shutil
import subprocess
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvstow.codec.search import key_candidates, value_candidates
from kvstow.codec.tables import BOUNDARIES, CENTROIDS, SIGNS
from kvstow.kernels.arguments import DecodeArgs, EncodeArgs
from kvstow.kernels.plan import Device, Shape, in_shares, plan_decode
from kvstow.kernels.source import cuda_header
from kvstow.kernels.specialise import DecodeKernel, EncodeKernel

EMULATOR = Path(__file__).with_name("emulator.h")
OPTIONS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]


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
    """A library."""
    source, library = folder / f"{name}.cc", folder / f"{name}.so"
    source.write_text(program)
    subprocess.run([compiler(), *OPTIONS, str(source), "-o", str(library)], check=True)
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
    counts = *sizes, n_splits, chunk, options.get("window", 0)
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


def encode(keys, values, widths, folder, *, search=False, position=0):
    """Planes of a capacity of 8 more tokens than given, written from `position` on."""
    b, h, n, d = keys.shape
    kb, vb = widths
    dtypes = np.int8 if kb == 8 else np.uint8, np.float16, np.float16, np.uint8, np.float16
    row_bytes = d * kb // 8, d // 32, d // 32, d * vb // 8, d // 32
    planes = [
        np.full((b, h, n + 8, width), 77, dtype)
        for width, dtype in zip(row_bytes, dtypes, strict=True)
    ]
    kernel = EncodeKernel(d, kb, vb, "float32", search=search)
    tables = [CENTROIDS[vb], key_candidates().words, value_candidates(vb).words]
    arrays = [keys, values, *planes, SIGNS[d].astype(np.int8), BOUNDARIES[vb], *tables]
    args = EncodeArgs(*map(_address, arrays), h, n, b * h * n, n + 8, position, h * n * d, n * d, d)
    launch = compile_kernel(kernel, folder)
    assert launch(ctypes.byref(args), kernel.n_blocks(b * h * n), 1, 1)
    return planes


def _address(array):
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data

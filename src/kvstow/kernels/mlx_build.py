"""Makes MLX's callables of the kernels, through `mx.fast.cuda_kernel`.

MLX writes a kernel's signature from the arrays it is given; the body only gathers them into
the arguments of the device source. MLX refuses to make a kernel without a CUDA back-end, so
they are made at their first use, and kept.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvstow.codec.tables import BOUNDARIES, CENTROIDS, SIGNS
from kvstow.kernels.arguments import DECODE_COUNTS
from kvstow.kernels.prefill import PrefillKernel
from kvstow.kernels.source import AnyKernel, cuda_include, digest
from kvstow.kernels.specialise import DecodeKernel, EncodeKernel

_PLANES = ("key_codes", "key_scales", "key_zeros", "value_codes", "value_scales")
ENCODE_COUNTS = ("n_kv_heads", "n_tokens", "n_vectors")
APPEND_COUNTS = (*ENCODE_COUNTS, "capacity", "position")
AT_TABLES = 16  # in 32 bits: behind the counts of attention, and aligned


def constants(head_dim: int, bits: int, counts: tuple[int, ...]) -> mx.array:
    """What `decode_callable` takes of a head_dim, the width of a value code, and counts."""
    return mx.array(np.concatenate([np.array(counts, np.int32), _tables(head_dim, bits)]))


@cache
def _tables(head_dim: int, bits: int) -> np.ndarray:
    behind_counts = np.zeros(AT_TABLES - len(DECODE_COUNTS) - 1, np.int32)
    floats = np.concatenate([CENTROIDS[bits], BOUNDARIES[bits], np.zeros(1, np.float32)])
    signs = SIGNS[head_dim].astype(np.int8)
    return np.concatenate([behind_counts, floats.view(np.int32), signs.view(np.int32)])


@cache
def decode_callable(kernel: DecodeKernel | PrefillKernel, ragged: bool, with_sinks: bool) -> Any:
    """Takes planes, queries, constants, arrivals, written; rows, sinks; gives output and parts.

    What `written` holds is not read: MLX waits for who makes it. Parts are sums, and weights
    behind them. One that stores takes keys and values at the end, and writes to the memory of
    planes, which are inputs all the same. Constants have 32 bits each: the numbers of
    `DECODE_COUNTS` and the scores' factor, and from `AT_TABLES` on 2^value_bits centroids, as
    many boundaries, of which the last is not used, and the signs.
    """
    names = [*_PLANES, "queries", "arrivals"]
    given = (["starts", "lengths"] if ragged else []) + (["sinks"] if with_sinks else [])
    stores = isinstance(kernel, DecodeKernel) and kernel.stores
    stored = ["new_keys", "new_values"] if stores else []
    null = [name for name in ("starts", "lengths", "sinks") if name not in given]
    table, n_counts = 1 << kernel.value_bits, len(DECODE_COUNTS)
    rows = "(size_t)args.batch * args.n_kv_heads * args.group * args.n_queries"
    gathered = [
        "const int* counts = constants;",
        *_counts(DECODE_COUNTS),
        f"args.scale_log2 = __int_as_float(counts[{n_counts}]);",
        f"args.centroids = (const float*)(constants + {AT_TABLES});",
        f"args.boundaries = args.centroids + {table};",
        f"args.signs = (const signed char*)(args.boundaries + {table});",
        "args.output = output; args.sums = parts;",
        f"args.weights = parts + {rows} * args.n_splits * {kernel.head_dim};",
        *(f"args.{name} = nullptr;" for name in null),
        *_pointers([*names, *given, *stored]),
    ]
    inputs = [*_PLANES, "queries", "constants", "arrivals", "written", *given, *stored]
    return _made(kernel, "_".join([kernel.name, *given]), inputs, ["output", "parts"], gathered)


@cache
def encode_callable(kernel: EncodeKernel) -> Any:
    """Takes keys, values, signs, boundaries, for a search its tables, and counts; gives planes.

    The tables are centroids, errors of keys and errors of values.
    """
    names = _encoded_from(kernel)
    gathered = [
        *_counts(ENCODE_COUNTS),
        "args.capacity = args.n_tokens; args.position = 0;",
        *_steps(kernel),
        *_pointers([*names, *_PLANES]),
    ]
    return _made(kernel, kernel.name, [*names, "counts"], list(_PLANES), gathered)


@cache
def append_callable(kernel: EncodeKernel) -> Any:
    """Takes what `encode_callable` does, then planes and `written`; gives another `written`.

    Planes are inputs, whose memory it writes to all the same.
    """
    names = [*_encoded_from(kernel), *_PLANES]
    gathered = [
        *_counts(APPEND_COUNTS),
        *_steps(kernel),
        *_pointers(names),
        "if (blockIdx.x == 0 && threadIdx.x == 0) *done = args.position;",
    ]
    name = f"{kernel.name}_append"
    inputs = [*names[:-5], "counts", *_PLANES, "written"]
    return _made(kernel, name, inputs, ["done"], gathered)


def _encoded_from(kernel: EncodeKernel) -> list[str]:
    tables = ["centroids", "key_errors", "value_errors"] if kernel.search else []
    return ["keys", "values", "signs", "boundaries", *tables]


def _steps(kernel: EncodeKernel) -> list[str]:
    return [
        f"args.token_step = {kernel.head_dim};",
        "args.head_step = args.token_step * args.n_tokens;",
        "args.batch_step = args.head_step * args.n_kv_heads;",
    ]


def _made(
    kernel: AnyKernel,
    name: str,
    inputs: list[str],
    outputs: list[str],
    gathered: list[str],
) -> Any:
    """MLX's callable of a kernel whose body is `gathered` and then the kernel's work."""
    # MLX's signature has no launch bounds, without which registers may not suffice for a
    # block: the kernel's name is a macro that adds them.
    # MLX keeps what it compiled on disk, by name: another source needs another name.
    name = f"{name}_{digest(kernel.file_name, *inputs, *outputs, *gathered)}"
    function = f"custom_kernel_{name}"
    bounds = f"#define {function} __launch_bounds__({kernel.threads}, {kernel.blocks}) {function}\n"
    args = "EncodeArgs" if isinstance(kernel, EncodeKernel) else "DecodeArgs"
    lines = [
        f"\n#undef {function}",
        "extern __shared__ __align__(128) char kvstow_shared[];",
        f"kvstow::{args} args;",
        *gathered,
        kernel.call("args", "kvstow_shared") + ";\n",
    ]
    return mx.fast.cuda_kernel(
        name=name,
        input_names=inputs,
        output_names=outputs,
        header=cuda_include(kernel.file_name) + kernel.checks + "\n" + bounds,
        source="\n".join(lines),
        shared_memory=kernel.shared_bytes,
    )


def _counts(names: Sequence[str]) -> list[str]:
    return [f"args.{name} = counts[{i}];" for i, name in enumerate(names)]


def _pointers(names: Sequence[str]) -> list[str]:
    """Arrays keep MLX's own element types, which the device source does not know."""
    return [f"args.{name} = (decltype(args.{name})){name};" for name in names]

"""Launches the kernels on PyTorch tensors through CuPy: the device code alone.

For measurements and checks on a machine that has PyTorch and CuPy, without a framework's
own overhead; the package itself launches through MLX (`kvstow.kernels.mlx`).
"""

import ctypes
import math
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvstow.codec import tables
from kvstow.codec.search import key_candidates, value_candidates
from kvstow.kernels import nvrtc
from kvstow.kernels.arguments import DecodeArgs, EncodeArgs
from kvstow.kernels.plan import AttentionPlan, Device, Shape, in_shares, plan_attention
from kvstow.kernels.source import AnyKernel, cuda_program
from kvstow.kernels.specialise import DecodeKernel, Dtype, EncodeKernel
from kvstow.require import require
from kvstow.scheme import GROUP_SIZE, Turbo

cupy = require("cupy")
torch = require("torch")

LOG2_E = math.log2(math.e)
Planes = tuple[Any, Any, Any, Any, Any]


def dtype_of(tensor: Any) -> Dtype:
    """The name of an element type."""
    name: Dtype = str(tensor.dtype).removeprefix("torch.")  # type: ignore[assignment]
    return name


class CudaHost:
    """Compiles each kernel once and launches it on the current PyTorch stream.

    Attributes:
        device: The GPU.
        compiled: What NVRTC said of each kernel.
        launches: How many there were.
    """

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        capability = 10 * properties.major + properties.minor
        self.device = Device(capability, properties.multi_processor_count)
        self.compiled: dict[AnyKernel, nvrtc.Compiled] = {}
        self.launches = 0
        self._kernels: dict[AnyKernel, Any] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._constants: dict[Any, Any] = {}

    def compile(self, kernels: Iterable[AnyKernel]) -> None:
        """Compile several kernels at once, on all processors."""
        wanted = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._kernels]
        architecture = f"sm_{self.device.capability}"
        with ThreadPoolExecutor() as pool:
            programs = pool.map(cuda_program, wanted)
            made = pool.map(nvrtc.compile_program, programs, [architecture] * len(wanted))
            for kernel, compiled in zip(wanted, made, strict=True):
                path = Path(self._folder.name) / f"{kernel.name}.cubin"
                path.write_bytes(compiled.cubin)
                function = cupy.RawModule(path=str(path)).get_function(kernel.name)
                function.max_dynamic_shared_size_bytes = kernel.shared_bytes
                self.compiled[kernel], self._kernels[kernel] = compiled, function

    def constant(self, table: dict[int, np.ndarray], key: int, dtype: type) -> Any:
        """A table of the codec on the device."""
        name = (id(table), key)
        if name not in self._constants:
            self._constants[name] = torch.tensor(table[key].astype(dtype), device="cuda")
        return self._constants[name]

    def _search_tables(self, bits: int) -> tuple[Any, Any]:
        name = "search", bits
        if name not in self._constants:
            words = key_candidates().words, value_candidates(bits).words
            self._constants[name] = [torch.tensor(w.view(np.int64)).cuda() for w in words]
        keys, values = self._constants[name]
        return keys, values

    def launch(self, kernel: AnyKernel, grid: tuple[int, ...], args: ctypes.Structure) -> None:
        """Launch a kernel on the current stream."""
        self.compile([kernel])
        self.launches += 1
        value = np.frombuffer(bytes(args), dtype=np.dtype((np.void, ctypes.sizeof(args))))[0]
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            self._kernels[kernel](grid, (kernel.threads,), (value,), shared_mem=kernel.shared_bytes)

    def encode(self, keys: Any, values: Any, scheme: Turbo, *, guard: bool = True) -> Planes:
        """Packed planes of contiguous ``(b, h, n, d)`` keys and values."""
        b, h, n, d = keys.shape
        planes = empty_planes((b, h, n), d, scheme)
        kb, vb, search = scheme.key_bits, scheme.value_bits, scheme.search
        kernel = EncodeKernel(d, kb, vb, dtype_of(keys), guard, search)
        signs = self.constant(tables.SIGNS, d, np.int8)
        pointers = [keys, values, *planes, signs, self.constant(tables.BOUNDARIES, vb, np.float32)]
        pointers.append(self.constant(tables.CENTROIDS, vb, np.float32))
        pointers += self._search_tables(vb) if search else (None, None)
        args = EncodeArgs(*map(_pointer, pointers), h, n, b * h * n, n, 0, h * n * d, n * d, d)
        self.launch(kernel, (kernel.n_blocks(b * h * n),), args)
        return planes

    def decode(self, queries: Any, planes: Planes, scheme: Turbo, **options: Any) -> "DecodeCall":
        """A call of attention, ready to be launched; options as those of `DecodeCall`."""
        return DecodeCall(self, queries, planes, scheme, **options)


class DecodeCall:
    """One call of attention with its buffers, which are filled with NaN before.

    Args:
        host: Where it runs.
        queries: ``(b, hq, l, d)``.
        planes: ``(b, h, capacity, *)``.
        scheme: Widths of the planes.
        lengths: Tokens of each row, int32; None: the whole capacity.
        starts: First token of each row, int32.
        sinks: A score of no token for each query head, float32.
        window: Tokens that a query sees; 0: all.
        chunk: Tokens of a split, in shares of the shortest; None: as planned.
        shares: Blocks of a step of rows with lengths; None: as planned.
        exact: Keys and values ``(b, h, 1, d)`` of a token of each row, to be stored first.
        stored: Which token; -1: each row's last.
    """

    def __init__(
        self, host: CudaHost, queries: Any, planes: Planes, scheme: Turbo, **options: Any
    ) -> None:
        b, hq, n_queries, d = queries.shape
        h, capacity = planes[0].shape[1:3]
        lengths, starts = options.get("lengths"), options.get("starts")
        exact = options.get("exact") or (None, None)
        n_tokens = int(lengths.max()) if lengths is not None else capacity
        kind = lengths is not None, options.get("exact") is not None
        shape = Shape(b, hq, h, n_queries, d, n_tokens, *kind)
        self.plan = planned(shape, scheme.widths, dtype_of(queries), host.device, options)
        n_splits, chunk = self.plan.n_splits, self.plan.chunk
        self._host = host
        rows, nan = b * hq * n_queries, math.nan
        self.output = torch.full_like(queries, nan)
        sums = torch.full((b, hq, n_queries, n_splits, d), nan, device="cuda")
        weights = torch.full((rows, n_splits, 2), nan, device="cuda")
        # Copied from the host, which tools that watch our kernels alone see being written.
        self.arrivals = torch.zeros(b * h * self.plan.row_blocks, dtype=torch.int32).cuda()
        centroids = host.constant(tables.CENTROIDS, scheme.value_bits, np.float32)
        signs = host.constant(tables.SIGNS, d, np.int8)
        self._keep = (queries, *planes, sums, weights, lengths, starts, options.get("sinks"), exact)
        read = [*planes, queries, centroids, signs, options.get("sinks"), starts, lengths]
        boundaries = host.constant(tables.BOUNDARIES, scheme.value_bits, np.float32)
        written = [self.output, sums, weights, self.arrivals, *exact, boundaries]
        sizes = b, h, self.plan.group, n_queries, capacity, n_tokens, self.plan.row_blocks
        more = options.get("window", 0), options.get("stored", -1), d**-0.5 * LOG2_E
        counts = *sizes, n_splits, chunk, *more
        self._args = DecodeArgs(*map(_pointer, read + written), *counts)

    def run(self) -> Any:
        """Launch it; returns the output."""
        self._host.launch(self.plan.kernel, self.plan.grid, self._args)
        return self.output


def planned(
    shape: Shape, widths: tuple[int, int], dtype: Dtype, device: Device, options: dict[str, Any]
) -> AttentionPlan:
    """The launch of a call, with another chunk or number of shares if `options` say so."""
    plan = plan_attention(shape, widths, dtype, device)
    chunk = options.get("chunk") or plan.chunk
    if shape.ragged and isinstance(plan.kernel, DecodeKernel):
        n_shares = options.get("shares") or device.n_processors
        return in_shares(shape, plan.kernel, n_shares, chunk)
    n_splits = max(1, -(-shape.n_tokens // chunk))
    return replace(plan, chunk=chunk, n_splits=n_splits, grid=(n_splits, *plan.grid[1:]))


def empty_planes(lead: tuple[int, ...], head_dim: int, scheme: Turbo) -> Planes:
    """Planes of uninitialised memory."""
    groups = head_dim // GROUP_SIZE

    def make(width: int, dtype: Any) -> Any:
        return torch.empty((*lead, width), dtype=dtype, device="cuda")

    key_dtype = torch.int8 if scheme.key_bits == 8 else torch.uint8
    return (
        make(head_dim * scheme.key_bits // 8, key_dtype),
        make(groups, torch.float16),
        make(groups, torch.float16),
        make(head_dim * scheme.value_bits // 8, torch.uint8),
        make(groups, torch.float16),
    )


def _pointer(tensor: Any) -> int | None:
    return None if tensor is None else int(tensor.data_ptr())

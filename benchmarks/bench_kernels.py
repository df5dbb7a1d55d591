"""Time of the kernels alone against cuDNN's bfloat16 attention and against the bytes they read.

    python benchmarks/bench_kernels.py --output benchmarks/results/kernels.jsonl

On a machine with PyTorch, CuPy and an NVIDIA GPU. Each call is a CUDA graph; before each
replay 512 MiB are read, so that nothing is left in the L2 cache; medians are taken, and a
ratio compares times of one run. A call whose output is not close to attention in float64 is
an error, never a row.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from check_kernels import TOLERANCE, attention
from cuda_host import CudaHost, Planes, cupy, dtype_of, empty_planes, torch

from kvstow.blas import use_fast_blas
from kvstow.codec import reference
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.evaluate.environment import environment
from kvstow.kernels.plan import Shape, plan_attention
from kvstow.kernels.source import AnyKernel
from kvstow.kernels.specialise import EncodeKernel
from kvstow.scheme import VALUE_BITS, Turbo

BLAS = use_fast_blas()
K8V3 = Turbo(8, 3)
# Batch, tokens, query heads, KV heads, head_dim, query tokens.
SHAPES = [(b, t, 32, 8, 128, 1) for b in (1, 16) for t in (4096, 16_384, 65_536)]
SHAPES += [
    (1, 131_072, 32, 8, 128, 1),
    (64, 16_384, 32, 8, 128, 1),
    (16, 65_536, 32, 8, 128, 4),
    (16, 65_536, 64, 8, 128, 1),
]
SHAPES += [(16, 65_536, 32, 8, 64, 1), (16, 16_384, 32, 8, 256, 1), (4, 16_384, 16, 8, 512, 1)]
STORING_SHAPES = [(b, t, 32, 8, 128, 1) for b, t in ((1, 4096), (1, 65_536), (16, 65_536))]
# What a call can't be faster than: its bytes are read, and nothing is done with them; or no bytes.
BOUNDS = r"""
extern "C" __global__ void nothing() {}
extern "C" __global__ void read_all(const uint4* from, long long n, int* never) {
  const long long share = (n + gridDim.x - 1) / gridDim.x, begin = share * blockIdx.x;
  const long long end = begin + share < n ? begin + share : n;
  unsigned seen = 0;
  for (long long i = begin + threadIdx.x; i < end; i += 8 * blockDim.x) {
    uint4 x[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
      const long long at = i + j * blockDim.x;
      x[j] = at < end ? __ldcs(from + at) : make_uint4(0, 0, 0, 0);
    }
    #pragma unroll
    for (int j = 0; j < 8; ++j) seen ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (seen == 0x12345678) *never = 1;
}"""
WIDTHS_SHAPE = (16, 65_536, 32, 8, 128, 1)
WIDTHS = [Turbo(8, v) for v in VALUE_BITS if v != 3] + [Turbo(4, v) for v in VALUE_BITS]
WIDTHS += [Turbo(k, v) for k in (5, 2) for v in VALUE_BITS]


class Clock:
    """Medians of CUDA graphs' times, in microseconds."""

    def __init__(self) -> None:
        self._flushed = torch.zeros(128 << 20, dtype=torch.int32, device="cuda")

    def median_us(self, call: Callable[[], Any], budget_ms: float = 30.0) -> float:
        """Of as many replays as fit in the budget, 7 to 60."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        first = self._times_us(graph, 1)[0]
        return statistics.median(
            self._times_us(graph, min(60, max(7, int(1e3 * budget_ms / first))))
        )

    def _times_us(self, graph: Any, n: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(n)]
        for begin, end in events:
            self._flushed.max()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in events]


def made_planes(lead: tuple[int, int, int], head_dim: int, scheme: Turbo) -> Planes:
    """Planes as they could come out of the encoder, without encoding."""
    keys, scales, zeros, values, norms = empty_planes(lead, head_dim, scheme)
    keys.view(torch.uint8).random_(0, 256)
    values.random_(0, 256)
    scales.uniform_(0.014, 0.018)
    zeros.normal_(0, 10).round_()
    norms.uniform_(0.75, 1.25)
    return keys, scales, zeros, values, norms


def host_us(clock: Clock, shape: tuple[int, ...]) -> float | None:
    """PyTorch's attention in bfloat16, the better of cuDNN and FlashAttention; None: neither."""
    b, t, hq, h, d, n_queries = shape
    attention_module = torch.nn.attention
    queries = torch.randn(b, hq, n_queries, d, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(b, h, t, d, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    times = []
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        which = getattr(attention_module.SDPBackend, backend)

        def call(which: Any = which) -> Any:
            with attention_module.sdpa_kernel(which):
                return torch.nn.functional.scaled_dot_product_attention(
                    queries, keys, values, enable_gqa=True
                )

        try:
            times.append(clock.median_us(call))
        except RuntimeError as error:  # a shape that the back-end does not have
            print(f"# {backend} does not run {shape}: {str(error)[:80]}", file=sys.stderr)
    return min(times, default=None)


def check_close(output: Any, queries: Any, planes: Planes, scheme: Turbo) -> None:
    """Compare the first KV head with float64.

    Values of noise all but cancel over a long context, and what rounding their centroids to float16
    adds does not: so much of a value is allowed beside what is allowed of the output.

    Raises:
        SystemExit: If it is further off than rounding explains.
    """
    one = [plane[:1, :1].cpu().numpy() for plane in planes]
    keys = reference.decode_keys(PackedKeys(*one[:3]), bits=scheme.key_bits)
    d, group = queries.shape[-1], queries.shape[1] // planes[0].shape[1]
    values = reference.decode_values(PackedValues(*one[3:]), bits=scheme.value_bits, head_dim=d)
    keys, values = (torch.tensor(x).cuda().double() for x in (keys, values))
    rows = torch.tensor([keys.shape[2]], device="cuda"), torch.zeros(1, device="cuda")
    want = attention(queries[:1, :group], keys, values, rows)
    rounded = 2**-15 * float(values.square().mean().sqrt()) * want.numel() ** 0.5
    error = float((output[:1, :group].double() - want).norm())
    if not error <= TOLERANCE[dtype_of(queries)] * float(want.norm()) + rounded:
        raise SystemExit(f"{scheme} is off by {error / float(want.norm())}")


def planned(host: CudaHost) -> Iterator[AnyKernel]:
    """The kernels of all rows, to be compiled at once."""
    rows = [(shape, K8V3) for shape in SHAPES] + [(WIDTHS_SHAPE, scheme) for scheme in WIDTHS]
    for (b, t, hq, h, d, n_queries), scheme in rows:
        shape = Shape(b, hq, h, n_queries, d, t)
        yield plan_attention(shape, scheme.widths, "bfloat16", host.device).kernel
    for b, t, hq, h, d, n_queries in STORING_SHAPES:
        shape = Shape(b, hq, h, n_queries, d, t, stores=True)
        yield plan_attention(shape, K8V3.widths, "bfloat16", host.device).kernel
    yield EncodeKernel(128, 8, 3, "bfloat16")
    yield EncodeKernel(128, 8, 3, "bfloat16", search=True)


def decode_row(
    host: CudaHost, clock: Clock, shape: tuple[int, ...], scheme: Turbo, *, stores: bool = False
) -> dict[str, Any]:
    """Time of one call of attention, with its output checked; of one that stores a token first."""
    b, t, hq, h, d, n_queries = shape
    planes = made_planes((b, h, t), d, scheme)

    def made(heads: int, tokens: int) -> Any:
        return torch.randn(b, heads, tokens, d, device="cuda", dtype=torch.bfloat16)

    queries = made(hq, n_queries)
    call = host.decode(queries, planes, scheme, exact=(made(h, 1), made(h, 1)) if stores else None)
    fused_us = clock.median_us(call.run)
    check_close(call.output, queries, planes, scheme)
    n_bytes = sum(plane.numel() * plane.element_size() for plane in planes)
    return {
        "bench": "kernel_decode_storing" if stores else "kernel_decode",
        "scheme": str(scheme),
        "batch": b,
        "tokens": t,
        "heads": [hq, h],
        "head_dim": d,
        "n_queries": n_queries,
        "splits": call.plan.n_splits,
        "kernel": call.plan.kernel.name,
        "registers": host.compiled[call.plan.kernel].registers,
        "fused_us": round(fused_us, 2),
        "fused_tb_per_s": round(n_bytes / fused_us / 1e6, 3),
        "bytes": n_bytes,
    }


def with_host(row: dict[str, Any], bf16_us: float | None) -> dict[str, Any]:
    """Beside the host's time: the ratio, and the part of what the bytes allow."""
    if bf16_us is None:
        return {**row, "bf16_us": None, "vs_bf16": None, "of_byte_limit": None}
    b, t, h, d = row["batch"], row["tokens"], row["heads"][1], row["head_dim"]
    limit_us = bf16_us * row["bytes"] / (4 * b * t * h * d)
    return {
        **row,
        "bf16_us": round(bf16_us, 2),
        "vs_bf16": round(bf16_us / row["fused_us"], 3),
        "of_byte_limit": round(limit_us / row["fused_us"], 3),
    }


def bounds_us(host: CudaHost, clock: Clock, n_bytes: int) -> dict[str, float]:
    """Times of a kernel that reads so many bytes, and of one that does nothing.

    Both have a block of 1024 threads on each processor.
    """
    module = cupy.RawModule(code=BOUNDS)
    memory = torch.zeros(n_bytes, dtype=torch.uint8, device="cuda").random_(0, 256)
    never = torch.zeros(1, dtype=torch.int32, device="cuda")

    def median_us(name: str, args: tuple[int, ...]) -> float:
        kernel = module.get_function(name)

        def call() -> None:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                kernel((host.device.n_processors,), (1024,), args)

        return round(clock.median_us(call), 2)

    read = memory.data_ptr(), n_bytes // 16, never.data_ptr()
    return {"read_us": median_us("read_all", read), "nothing_us": median_us("nothing", ())}


def ragged_row(host: CudaHost, clock: Clock) -> dict[str, Any]:
    """One row of 128k tokens beside fifteen of 2k, and a kernel that only reads as many bytes."""
    planes = made_planes((16, 8, 131_072), 128, K8V3)
    queries = torch.randn(16, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((16,), 2048, dtype=torch.int32, device="cuda")
    lengths[3] = 131_072
    call = host.decode(queries, planes, K8V3, lengths=lengths)
    fused_us = clock.median_us(call.run)
    n_bytes = int(lengths.sum()) * 8 * K8V3.bytes_per_token(128)
    return {
        "bench": "kernel_decode_ragged",
        "scheme": str(K8V3),
        "rows": "1x131072 + 15x2048",
        "fused_us": round(fused_us, 2),
        "fused_tb_per_s": round(n_bytes / fused_us / 1e6, 3),
        **bounds_us(host, clock, n_bytes),
    }


def encode_row(host: CudaHost, clock: Clock, scheme: Turbo, n_tokens: int) -> dict[str, Any]:
    """Keys and values of eight heads of 128, bytes read and written."""
    keys, values = (
        torch.randn(1, 8, n_tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"
    )
    us = clock.median_us(lambda: host.encode(keys, values, scheme))
    n_bytes = 8 * n_tokens * (512 + scheme.bytes_per_token(128))
    return {
        "bench": "kernel_encode",
        "scheme": str(scheme),
        "tokens": n_tokens,
        "heads": 8,
        "head_dim": 128,
        "encode_us": round(us, 2),
        "encode_tb_per_s": round(n_bytes / us / 1e6, 3),
    }


def measured(host: CudaHost, clock: Clock) -> Iterator[dict[str, Any]]:
    """All rows, each as soon as it is measured."""
    for shape in SHAPES:
        bf16_us = host_us(clock, shape)
        for scheme in (K8V3, *WIDTHS) if shape == WIDTHS_SHAPE else (K8V3,):
            yield with_host(decode_row(host, clock, shape, scheme), bf16_us)
    for shape in STORING_SHAPES:
        yield decode_row(host, clock, shape, K8V3, stores=True)
    yield ragged_row(host, clock)
    for scheme in (K8V3, Turbo(8, 3, search=True)):
        for n_tokens in (1, 32_768):
            yield encode_row(host, clock, scheme, n_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # why PyTorch does not take one of its back-ends
    host, clock = CudaHost(), Clock()
    about = environment(" ".join(["python", *sys.argv]), BLAS) if options.output else {}

    def report(row: dict[str, Any]) -> None:
        print({k: v for k, v in row.items() if k not in ("kernel", "bench", "bytes")}, flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                print(json.dumps({**row, **about}), file=file)

    host.compile(planned(host))
    for row in measured(host, clock):
        report(row)


if __name__ == "__main__":
    main()

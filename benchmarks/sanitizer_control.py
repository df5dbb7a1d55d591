"""A kernel with one fault for each tool of compute-sanitizer, which that tool has to find.

    compute-sanitizer --tool racecheck python benchmarks/sanitizer_control.py racecheck

What a tool calls clean says something only where it finds this: on this GPU, in this
container and through the filter of `check_sanitizer.py`, which these names pass too.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from kvstow.kernels import nvrtc
from kvstow.require import require

cupy = require("cupy")

N = 128  # 512 bytes, so another allocation may follow at once
FAULTS = {
    "memcheck": "y[t] = x[N + t];",  # beyond x, maybe within y
    "racecheck": "__shared__ int s[N]; s[t] = x[t]; y[t] = s[N - 1 - t];",  # without a barrier
    "initcheck": "y[t] = unwritten[t];",
    "synccheck": "if (t < N / 2 + 8) __syncthreads(); y[t] = x[t];",  # eight threads of a warp
}
SOURCE = """
#define N %d
extern "C" __global__ void kvstow_control(const int* x, const int* unwritten, int* y) {
  const int t = threadIdx.x;
  %s
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=FAULTS)
    fault = FAULTS[parser.parse_args().tool]
    cupy.cuda.set_allocator(None)  # each array an allocation of its own
    x, unwritten, y = (cupy.empty(N, dtype=np.int32) for _ in range(3))
    x.set(np.arange(N, dtype=np.int32))
    architecture = f"sm_{cupy.cuda.Device().compute_capability}"
    compiled = nvrtc.compile_program(SOURCE % (N, fault), architecture)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "control.cubin"
        path.write_bytes(compiled.cubin)
        kernel = cupy.RawModule(path=str(path)).get_function("kvstow_control")
    kernel((1,), (N,), (x, unwritten, y))
    cupy.cuda.Device().synchronize()
    print(f"1 kernels, 1 launches on {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}")


if __name__ == "__main__":
    main()

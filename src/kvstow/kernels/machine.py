"""What decides how a kernel behaves, beside its arguments: GPU, driver, MLX and the source."""

import contextlib
import ctypes
import hashlib
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

_DRIVER = Path("/proc/driver/nvidia/version")
# What makes machine code out of a specialisation, beside the device source.
_LOADERS = ("mlx.py", "mlx_build.py", "plan.py", "source.py", "specialise.py")


def identity() -> dict[str, str]:
    """Where a kernel has run: if one of these differs, it has not run here."""
    info = mx.device_info()
    capability = ".".join(str(info.get(f"compute_capability_{p}", "?")) for p in ("major", "minor"))
    return {
        "device": str(info.get("device_name", "unknown")),
        "capability": capability,
        "driver": _driver(),
        "cuda": _cuda(),
        "nvrtc": _version("nvidia-cuda-nvrtc"),
        "mlx": _version("mlx"),
        "source": source_digest(),
    }


@cache
def source_digest() -> str:
    """Changes with the device source of any op, and with what launches it."""
    here = files("kvstow.kernels")
    cuda = sorted(entry.name for entry in here.joinpath("cuda").iterdir())
    digest = hashlib.sha256()
    for path in (*(here.joinpath("cuda", n) for n in cuda), *map(here.joinpath, _LOADERS)):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _driver() -> str:
    with contextlib.suppress(OSError):
        return _DRIVER.read_text(encoding="utf-8").partition("\n")[0].strip()
    return "unknown"


@cache
def _cuda() -> str:
    """The latest CUDA that the driver knows."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"

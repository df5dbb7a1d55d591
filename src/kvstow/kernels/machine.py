"""What decides how a kernel behaves, beside its arguments: GPU, driver, MLX and the source."""

import contextlib
import ctypes
import hashlib
import platform
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from kvstow.kernels import backend

_DRIVER = Path("/proc/driver/nvidia/version")
# What makes machine code out of a specialisation, beside the device source.
_COMMON = ("arguments.py", "calls.py", "plan.py", "source.py", "specialise.py")
_LOADERS = {
    "cuda": ("mlx.py", "mlx_build.py", "prefill.py", *_COMMON),
    "metal": ("metal_mlx.py", "metal_plan.py", *_COMMON),
}


def identity() -> dict[str, str]:
    """Where a kernel has run: if one of these differs, it has not run here."""
    info = mx.device_info()
    found = {"device": str(info.get("device_name", "unknown"))}
    if backend.name() == "metal":
        # macOS brings the driver and the compiler.
        found |= {"capability": str(info.get("architecture", "?"))}
        found |= {"driver": f"macOS {platform.mac_ver()[0] or 'unknown'}"}
    else:
        parts = (info.get(f"compute_capability_{part}", "?") for part in ("major", "minor"))
        found |= {"capability": ".".join(map(str, parts)), "driver": _driver(), "cuda": _cuda()}
        found |= {"nvrtc": _version("nvidia-cuda-nvrtc")}
    return {**found, "mlx": _version("mlx"), "source": source_digest(backend.name() or "cuda")}


@cache
def source_digest(folder: str) -> str:
    """Changes with the device source of any op in ``cuda`` or ``metal``, and what launches it."""
    here = files("kvstow.kernels")
    names = sorted(entry.name for entry in here.joinpath(folder).iterdir())
    paths = [here.joinpath(folder, name) for name in names]
    digest = hashlib.sha256()
    for path in (*paths, *map(here.joinpath, _LOADERS[folder])):
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

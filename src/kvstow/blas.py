"""A fast BLAS for mlx's CPU back-end on Linux, put in place inside the running process.

mlx's Linux wheel brings the reference BLAS, which is tens of times slower than
the machine. `libmlx.so` reaches its BLAS through three pointers, one for each
``cblas_?gemm``, that the dynamic linker fills. This module finds them in the
library's relocation tables (System V ABI, "Dynamic Linking") and points them at
OpenBLAS or MKL. That works before and after ``import mlx.core``, changes no
file, and is checked by products. docs/decisions/0002-blas.md says why.
"""

import ctypes
import importlib
import importlib.metadata
import os
import platform
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstow.errors import KvstowError

FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
CHOICES = ("auto", "off", "openblas", "mkl")
# Relocations that fill in a function's address: GLOB_DAT and JUMP_SLOT.
_SLOT_KINDS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
_PROT_READ_WRITE = 1 | 2
_ELF64 = b"\x7fELF\x02"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """Which BLAS mlx's CPU back-end uses.

    Args:
        name: mkl or openblas if kvstow put it in place, else bundled (mlx's own).
        active: Whether kvstow put it in place.
        notice: One line for the user: what is used, or why nothing was done. Empty where
            there is nothing to do: not on Linux, on a GPU, or without mlx.
        path: The library that was put in place.
        threads: How many threads it uses.
    """

    name: str
    active: bool
    notice: str
    path: Path | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class _Library:
    """A BLAS that a pip package installs, and what it calls things."""

    name: str
    package: str
    file_name: str
    symbol_prefix: str
    get_threads: str
    set_threads: str
    threads_variable: str

    def path(self) -> Path | None:
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError:
            return None
        paths = [Path(str(file.locate())) for file in files if self.file_name in file.name]
        return next((path.resolve() for path in paths if path.exists()), None)


# In order of preference, by the numbers in docs/decisions/0002-blas.md.
_LIBRARIES = (
    _Library(
        "openblas",
        "scipy-openblas32",
        "libscipy_openblas",
        "scipy_",
        "scipy_openblas_get_num_threads",
        "scipy_openblas_set_num_threads",
        "OPENBLAS_NUM_THREADS",
    ),
    _Library(
        "mkl",
        "mkl",
        "libmkl_rt.so",
        "",
        "MKL_Get_Max_Threads",
        "MKL_Set_Num_Threads",
        "MKL_NUM_THREADS",
    ),
)
_NOTHING_TO_DO = ""  # the reason that needs no notice
# What reading an ELF image that is not as expected can raise.
_UNREADABLE = (OSError, AttributeError, LookupError, ValueError, struct.error)
_report: BlasReport | None = None


def use_fast_blas() -> BlasReport:
    """Make mlx's CPU back-end use OpenBLAS or MKL, whichever is installed; imports mlx.

    ``KVSTOW_BLAS`` may be off, openblas, mkl, or auto, which is the default and means OpenBLAS
    if it is installed, else MKL, else mlx's own. The first call decides for the whole process.
    One processor is left free, unless ``OMP_NUM_THREADS`` or the library's own variable is set
    (``OPENBLAS_NUM_THREADS``, ``MKL_NUM_THREADS``).

    Raises:
        KvstowError: If ``KVSTOW_BLAS`` is none of these, or names a library that is not
            installed or cannot be used here.
    """
    global _report
    choice = os.environ.get("KVSTOW_BLAS") or "auto"
    if choice not in CHOICES:
        raise KvstowError(f"KVSTOW_BLAS must be one of {', '.join(CHOICES)}; got {choice!r}")
    if _report is None:
        _report = _decide(choice)
    return _report


def _decide(choice: str) -> BlasReport:
    found = "KVSTOW_BLAS=off" if choice == "off" else _find(choice)
    if isinstance(found, BlasReport):
        return found
    for library in _LIBRARIES:
        if library.name == choice:
            reason = found or "only mlx on a CPU under Linux takes another BLAS"
            raise KvstowError(
                f"KVSTOW_BLAS={choice} cannot be done: {reason} "
                f"(it needs pip install {library.package}; KVSTOW_BLAS=auto takes what there is)"
            )
    return BlasReport("bundled", False, f"BLAS: mlx's own ({found})" if found else "")


def _find(choice: str) -> BlasReport | str:
    """Put a library in place, or say why not."""
    if sys.platform != "linux":
        return _NOTHING_TO_DO
    if platform.machine() not in _SLOT_KINDS:
        return f"no other is known on {platform.machine()}"
    try:
        mx: Any = importlib.import_module("mlx.core")
    except ImportError:
        return _NOTHING_TO_DO
    if mx.default_device() != mx.cpu:
        return _NOTHING_TO_DO
    wanted = [library for library in _LIBRARIES if choice in ("auto", library.name)]
    for library in wanted:
        if (path := library.path()) is not None:
            return _install(library, path, mx)
    command = f"slow; for a fast one: pip install {wanted[0].package}"
    return command if choice == "auto" else "it is not installed"


def _install(library: _Library, path: Path, mx: Any) -> BlasReport | str:
    """Swap, check, and swap back if the check fails; returns the reason if nothing is swapped."""
    try:
        loaded = ctypes.CDLL(str(path))
        slots = blas_slots()
        if set(slots.values()) != set(FUNCTIONS):
            return "this build of mlx calls a BLAS in another way"
        threads = _set_threads(loaded, library)
        before = _point({s: _address(loaded, library.symbol_prefix + n) for s, n in slots.items()})
    except _UNREADABLE as error:
        return f"{path} cannot be used: {error!r}"
    if not _products_are_right(mx):
        _point(before)
        return f"{path} gave wrong products"
    notice = f"BLAS: {library.name}, threads: {threads} (KVSTOW_BLAS=off for mlx's own)"
    return BlasReport(library.name, True, notice, path, threads)


def _set_threads(loaded: ctypes.CDLL, library: _Library) -> int:
    # A product waits for its slowest thread: with as many threads as processors, one other
    # busy program makes every small product wait for the scheduler, 4 ms instead of 0.1.
    if not {library.threads_variable, "OMP_NUM_THREADS"} & os.environ.keys():
        loaded[library.set_threads](max(1, _available_cpus() - 1))
    return int(loaded[library.get_threads]())


def _available_cpus() -> int:
    """Processors that this process may use, a container's quota included."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2 here, or a quota of "max"
        return cpus


def blas_slots() -> dict[int, str]:
    """Where the loaded libmlx.so keeps its pointers to `FUNCTIONS`: address to name."""
    base = _base_address("/libmlx.so")
    if base is None:
        return {}
    dynamic = _dynamic_section(base)
    slots = {}
    for table, size in (("RELA", "RELASZ"), ("JMPREL", "PLTRELSZ")):
        entries = ctypes.string_at(dynamic[table], dynamic[size]) if table in dynamic else b""
        for offset, info, _ in struct.iter_unpack("<QQq", entries):
            if info & 0xFFFFFFFF in _SLOT_KINDS[platform.machine()]:
                symbol = ctypes.string_at(dynamic["SYMTAB"] + 24 * (info >> 32), 4)
                name = ctypes.string_at(dynamic["STRTAB"] + int.from_bytes(symbol, "little"))
                if (function := name.decode(errors="replace")) in FUNCTIONS:
                    slots[base + offset] = function
    return slots


def _base_address(suffix: str) -> int | None:
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if line.endswith(suffix):
            return int(line.partition("-")[0], 16)
    return None


def _dynamic_section(base: int) -> dict[str, int]:
    """The tags of the ELF image at `base` that lead to its relocations, as absolute addresses.

    Raises:
        ValueError: If it is no 64-bit ELF image, or has no dynamic section.
    """
    if ctypes.string_at(base, len(_ELF64)) != _ELF64:
        raise ValueError("libmlx.so is no 64-bit ELF image")
    tags = {2: "PLTRELSZ", 5: "STRTAB", 6: "SYMTAB", 7: "RELA", 8: "RELASZ", 23: "JMPREL"}
    (table,) = struct.unpack("<Q", ctypes.string_at(base + 32, 8))
    n_headers = int.from_bytes(ctypes.string_at(base + 56, 2), "little")
    headers = struct.iter_unpack("<II6Q", ctypes.string_at(base + table, 56 * n_headers))
    dynamic = next((h for h in headers if h[0] == 2), None)  # PT_DYNAMIC
    if dynamic is None:
        raise ValueError("libmlx.so has no dynamic section")
    found = {}
    for tag, value in struct.iter_unpack("<QQ", ctypes.string_at(base + dynamic[3], dynamic[6])):
        if tag in tags:
            is_size = tags[tag].endswith("SZ")
            # glibc may have made the addresses absolute already
            found[tags[tag]] = value if is_size or value >= base else base + value
    return found


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(library[name], ctypes.c_void_p).value or 0


def _point(targets: dict[int, int]) -> dict[int, int]:
    """Write the pointers, whose page may be read-only after relocation; returns what they held.

    Raises:
        OSError: If a page cannot be made writable; no pointer has been changed then.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    for slot in targets:
        start = ctypes.c_void_p(slot // page * page)
        if libc.mprotect(start, ctypes.c_size_t(page), _PROT_READ_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
    before = {}
    for slot, target in targets.items():
        pointer = ctypes.c_void_p.from_address(slot)
        before[slot] = pointer.value or 0
        pointer.value = target
    return before


def _products_are_right(mx: Any) -> bool:
    """Whether mlx's products now agree with numpy's, for each function and a transposed operand."""
    rng = np.random.default_rng(0)
    for dtype, tolerance in (("float32", 1e-4), ("float64", 1e-10), ("complex64", 1e-4)):
        a = rng.standard_normal((33, 65)).astype(dtype)
        b = rng.standard_normal((17, 65)).astype(dtype)
        with mx.stream(mx.cpu):
            product = mx.array(a, getattr(mx, dtype)) @ mx.array(b, getattr(mx, dtype)).T
            got = np.array(product)
        if not np.allclose(got, a @ b.T, rtol=tolerance, atol=tolerance):
            return False
    return True

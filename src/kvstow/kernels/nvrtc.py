"""Compiles CUDA source with NVRTC, with or without a GPU, and reads what the code takes.

NVRTC is the run-time compiler of CUDA that MLX and PyTorch bring along
(``nvidia-cuda-nvrtc`` on PyPI). It makes machine code for any architecture it knows, and
the machine code says how many registers a thread has and how many bytes of memory it
needs beside them: its stack frame, which is where registers are spilled to.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvstow.errors import MissingDependency

_SONAME = "libnvrtc.so.13"
# Attributes of a kernel in the section .nv.info, as (symbol, number) pairs.
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one program, and what its kernels take at most.

    Attributes:
        cubin: An ELF file that the driver loads.
        registers: Of a thread.
        frame_bytes: Memory of a thread for spilled registers and arrays; 0 is none.
        log: What the compiler said.
    """

    cubin: bytes
    registers: int
    frame_bytes: int
    log: str


def compile_program(source: str, architecture: str, options: Sequence[str] = ()) -> Compiled:
    """Machine code of a program.

    Args:
        source: CUDA C++ without includes.
        architecture: ``sm_90`` and the like.
        options: More options of NVRTC.

    Raises:
        MissingDependency: If there is no NVRTC.
        ValueError: If the program does not compile; the message is the compiler's.
    """
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kvstow.cu", 0, None, None
        )
    )
    try:
        flags = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), encoded)
        log = _output(nvrtc, program, "ProgramLog").rstrip(b"\0").decode().strip()
        if failed:
            raise ValueError(f"not compiled for {architecture}: {log}")
        cubin = _output(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(cubin, _most(cubin, _REGISTERS), _most(cubin, _FRAME_SIZE), log)


@cache
def _library() -> Any:
    for folder in (*_folders(), Path()):  # the last: wherever the system looks
        try:
            # NVRTC opens its other library by name, which finds it once it is loaded.
            for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")) if folder.name else []:
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(folder / _SONAME))
        except OSError:
            continue
    raise MissingDependency("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


def _folders() -> list[Path]:
    """Where the package of CUDA 13 lies."""
    package = find_spec("nvidia")
    roots = [] if package is None else list(package.submodule_search_locations or [])
    return [folder for root in roots if (folder := Path(root) / "cu13" / "lib").is_dir()]


def _output(nvrtc: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(code: int) -> None:
    if code:
        raise ValueError(f"NVRTC failed with error {code}")


def _most(cubin: bytes, attribute: int) -> int:
    """The greatest number that an attribute has in any section .nv.info."""
    found = [
        struct.unpack_from("<I", payload, 4)[0]
        for name, data in _sections(cubin)
        if name == ".nv.info"
        for kind, payload in _attributes(data)
        if kind == attribute
    ]
    return max(found, default=0)


def _sections(elf: bytes) -> list[tuple[str, bytes]]:
    """Name and content of every section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_bytes) for i in range(count)]
    names = headers[names_at][4]

    def name_of(at: int) -> str:
        return elf[names + at : elf.index(b"\0", names + at)].decode()

    return [(name_of(h[0]), elf[h[4] : h[4] + h[5]]) for h in headers if h[1] != 8]  # 8: no bytes


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    """Kind and payload of every attribute that has one of its own size."""
    found, at = [], 0
    while at + 4 <= len(info):
        layout, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if layout == 4:  # otherwise `size` is the value itself
            found.append((kind, info[at : at + size]))
            at += size
    return found

"""Text of one specialised kernel, from the files beside this module.

The device source is package data: plain CUDA C++ in ``cuda/`` and Metal in ``metal/``, whose
files include each other by name. Runtime compilers get one text without a search path, so
includes are replaced by the files, each once. `cuda_program` is a whole program for one kernel, for
whoever launches kernels themselves; a framework that writes the kernel's signature takes
`cuda_include` and the kernel's own name for what is called (`specialise`).
"""

import hashlib
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from kvstow.kernels.prefill import PrefillKernel
from kvstow.kernels.specialise import EncodeKernel, Kernel

# Whatever is compiled.
AnyKernel = Kernel | PrefillKernel

_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_COMMENT = re.compile(r"^//.*\n|  //.*$", re.MULTILINE)


@cache
def cuda_header(file_name: str) -> str:
    """The text of ``cuda/<file_name>`` with everything it includes, each file once."""
    return _with_includes("cuda", file_name)


@cache
def metal_header(file_name: str) -> str:
    """The same of ``metal/<file_name>``, without comments: MLX handles the text at every call."""
    return _COMMENT.sub("", _with_includes("metal", file_name))


@cache
def cuda_include(file_name: str) -> str:
    """One line that stands for `cuda_header`, where the package is a folder; else its text.

    MLX handles the text of a kernel at every call, and the text is long.
    """
    path = files("kvstow.kernels").joinpath("cuda", file_name)
    return f'#include "{path}"\n' if isinstance(path, Path) else cuda_header(file_name)


def digest(file_name: str, *more: str) -> str:
    """Eight hexadecimal digits that change with the device source of an op, and what is added."""
    return hashlib.sha256("\0".join([cuda_header(file_name), *more]).encode()).hexdigest()[:8]


def cuda_program(kernel: AnyKernel) -> str:
    """A program with one ``extern "C"`` kernel of the name `Kernel.name`.

    It takes one argument by value: the ``DecodeArgs`` or ``EncodeArgs`` of its header.
    """
    args = "EncodeArgs" if isinstance(kernel, EncodeKernel) else "DecodeArgs"
    return f"""{cuda_header(kernel.file_name)}
{kernel.checks}
extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.blocks})
{kernel.name}(const kvstow::{args} args) {{
  extern __shared__ __align__(128) char shared[];
  {kernel.call("args", "shared")};
}}
"""


def _with_includes(folder: str, file_name: str) -> str:
    seen: set[str] = set()

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = files("kvstow.kernels").joinpath(folder, name).read_text(encoding="utf-8")
        text = text.replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: text_of(match[1]), text)

    return text_of(file_name)

"""Runs Metal kernels on the CPU: stands for `mx.fast.metal_kernel`, with the text that MLX makes.

MLX writes the text of a kernel, its signature included, also where there is no Metal, when a graph
is exported. That very text is compiled as C++ against ``metal/cpu/metal_stdlib``, but that an array
of a threadgroup is one of ``runtime.cc``, which also checks every access to memory.
"""

import ctypes
import hashlib
import math
import re
import subprocess
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvstow.kernels import backend, metal_mlx
from tests.kernels.emulated import compiler
from tests.kernels.metal_spaces import faults

SHIM = Path(__file__).with_name("metal") / "cpu"
# C++14, as Metal before version 4; and a call before each access to memory.
OPTIONS = ["-std=gnu++14", "-O1", "-ffp-contract=off", "-fPIC", "-w", "-fsanitize=thread"]
OPTIONS += ["--param", "tsan-instrument-func-entry-exit=0"]
SHARED = re.compile(r"^threadgroup (\w+) (\w+)\[(\d+)\];$", re.MULTILINE)
PARAMETER = re.compile(r"^  [\w ]+[*&]? (\w+) \[\[(\w+)(?:\((\d+)\))?\]\]", re.MULTILINE)
ATTRIBUTES = {
    "threadgroup_position_in_grid": "at.group",
    "thread_index_in_threadgroup": "at.in_group",
    "thread_index_in_simdgroup": "at.in_group % 32",
    "simdgroup_index_in_threadgroup": "at.in_group / 32",
}
READ, WRITE = 1, 2
GAP = 4096
_real_metal_kernel = mx.fast.metal_kernel


@pytest.fixture(scope="session")
def metal_folder(tmp_path_factory):
    """Where kernels are compiled, each once."""
    return tmp_path_factory.mktemp("metal")


@pytest.fixture
def metal(monkeypatch, metal_folder):
    """A GPU of Apple that is a CPU."""
    if compiler() is None:
        pytest.skip("needs a g++ that knows float16, and ucontext")
    launched = Launched(metal_folder)
    caches = [metal_mlx.decode_callable, metal_mlx.merge_callable, metal_mlx.encode_callable]
    caches.append(metal_mlx._prepare)
    for made in caches:
        made.cache_clear()
    monkeypatch.setattr(mx.fast, "metal_kernel", launched.metal_kernel)
    monkeypatch.setattr(backend, "name", lambda: "metal")
    yield launched
    for made in caches:
        made.cache_clear()


class Launched(list):
    """What was launched: the keyword arguments of kernel and call, and the ``text``.

    Attributes:
        readable: Name of an input to booleans that say which of its elements may be read.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.readable = {}
        self.outputs = []  # and which of their bytes were written

    def metal_kernel(self, **made):
        """Takes the place of `mx.fast.metal_kernel`."""

        def kernel(**given):
            text = text_of(made, given, self.folder)
            self.append({**given, **made, "text": text})
            return self._run(made, given, text)

        return kernel

    def _run(self, made, given, text):
        inputs = dict(zip(made["input_names"], given["inputs"], strict=True))
        shapes = {f"{name}_shape": mx.array(x.shape) for name, x in inputs.items()}
        outputs = list(zip(given["output_shapes"], given["output_dtypes"], strict=True))
        arena = Arena()
        for name in (name for name, _, index in PARAMETER.findall(text) if index):
            if name in made["output_names"]:
                shape, dtype = outputs[made["output_names"].index(name)]
                arena.add(name, b"\x7f" * (math.prod(shape) * dtype.size), WRITE)
            else:
                array = {**inputs, **shapes}[name]
                arena.add(name, as_numpy(array).tobytes(), READ)
                arena.allow(name, self._readable(name, array))
        arena.launch(compiled(text, self.folder), given["grid"], given["threadgroup"])
        arrays = [
            mx.array(arena.bytes_of(name).view(f"u{dtype.size}")).view(dtype).reshape(shape)
            for name, (shape, dtype) in zip(made["output_names"], outputs, strict=True)
        ]
        self.outputs += zip(arrays, map(arena.is_written, made["output_names"]), strict=True)
        return arrays

    def _readable(self, name, array):
        """Which bytes of an input may be read."""
        for made, is_written in self.outputs:
            if made is array:
                return is_written
        mask = np.broadcast_to(self.readable.get(name, True), array.shape)
        return np.repeat(mask.ravel(), array.dtype.size)


class Arena:
    """Memory of one launch: all buffers with gaps between, and what may be done to each byte."""

    def __init__(self):
        self.spans = {}
        self.parts, self.maps = [bytes(GAP)], [bytes(GAP)]

    def add(self, name, data, right):
        at = sum(map(len, self.parts))
        self.spans[name] = slice(at, at + len(data))
        pad = bytes(-len(data) % GAP + GAP)
        self.parts += [data, pad]
        self.maps += [bytes([right]) * len(data), pad]

    def allow(self, name, which):
        i = 1 + 2 * list(self.spans).index(name)
        self.maps[i] = (np.frombuffer(self.maps[i], np.uint8) * which).astype(np.uint8).tobytes()

    def bytes_of(self, name):
        return self.memory[self.spans[name]]

    def is_written(self, name):
        return self.map[self.spans[name]] == 0

    def launch(self, library, grid, threadgroup):
        assert threadgroup[1:] == (1, 1)
        assert grid[0] % threadgroup[0] == 0
        self.memory = np.frombuffer(b"".join(self.parts), np.uint8).copy()
        self.map = np.frombuffer(b"".join(self.maps), np.uint8).copy()
        base, size = self.memory.ctypes.data, self.memory.nbytes
        places = [base + span.start for span in self.spans.values()]
        buffers, threads = (ctypes.c_void_p * len(places))(*places), (ctypes.c_uint * 3)(*grid)
        said = library.run(buffers, base, self.map.ctypes.data, size, threads, threadgroup[0])
        if said:
            raise MemoryError(self._with_name(said.decode()))

    def _with_name(self, said):
        """A fault, its place as a buffer and a byte of it."""
        what, _, at = said.partition(" at ")
        for name, span in self.spans.items():
            if at and span.start - GAP // 2 <= int(at) < span.stop + GAP // 2:
                return f"{what} of {name} at {int(at) - span.start}"
        return said


def text_of(made, given, folder):
    """The text that MLX compiles for a call, by exporting a graph of it."""
    path = folder / "exported.mlxfn"
    call = {key: value for key, value in given.items() if key != "inputs"}
    kernel = _real_metal_kernel(**made)
    mx.export_function(str(path), lambda *x: kernel(inputs=list(x), **call), *given["inputs"])
    data = path.read_bytes().decode("latin-1")
    begin = data.index(made.get("header", "") + "[[kernel]]")
    end = data.index(made["source"] + "\n}\n", begin) + len(made["source"] + "\n}\n")
    return data[begin:end]


def compiled(text, folder):
    """The library of a text, whose `run` launches it; its address spaces are looked at before."""
    path = folder / (hashlib.sha256(text.encode()).hexdigest()[:16] + ".so")
    if not path.exists():
        if found := faults(text):
            raise SyntaxError("\n".join(found))
        source = path.with_suffix(".cc")
        source.write_text(program(text))
        build([*OPTIONS, f"-I{SHIM}", "-c", source, "-o", path.with_suffix(".o")])
        build(["-shared", path.with_suffix(".o"), runtime(folder), "-o", path])
    library = ctypes.CDLL(str(path))
    address, number = ctypes.c_void_p, ctypes.c_uint
    library.run.argtypes = [address, address, address, ctypes.c_uint64, address, number]
    library.run.restype = ctypes.c_char_p
    return library


def program(text):
    """C++ that launches the kernel in MLX's text."""
    (name,) = re.findall(r"\[\[kernel\]\] void (\w+)\(", text)
    arguments = ", ".join(
        f"shim::Argument{{{index}}}" if index else ATTRIBUTES[attribute]
        for _, attribute, index in PARAMETER.findall(text)
    )
    shared = (
        r"threadgroup \1* \2 = (threadgroup \1*)shim::shim_threadgroup_memory(sizeof(\1) * \3);"
    )
    return f"""{SHARED.sub(shared, text)}
static void body() {{
  const shim::Position at = shim::shim_position();
  {name}({arguments});
}}
extern "C" const char* run(void* const* buffers, char* arena, char* map, ulong arena_bytes,
                           const uint* threads, uint group) {{
  return shim::shim_launch(body, buffers, arena, map, arena_bytes, threads, group);
}}
"""


@cache
def runtime(folder):
    path = folder / "runtime.o"
    build(["-std=c++17", "-O2", "-fPIC", "-c", SHIM / "runtime.cc", "-o", path])
    return path


def build(arguments):
    subprocess.run([compiler(), *map(str, arguments)], check=True)


def as_numpy(array):
    """Its bytes: numpy has no bfloat16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)

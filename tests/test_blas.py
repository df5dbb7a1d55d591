"""Each test runs in its own process: the first call of `use_fast_blas` decides for the process."""

import ctypes
import importlib.metadata
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kvstow import KvstowError, blas
from kvstow.blas import FUNCTIONS, use_fast_blas

pytestmark = pytest.mark.mlx
pytest.importorskip("mlx.core")
on_linux_cpu = pytest.mark.skipif(sys.platform != "linux", reason="macOS has a fast BLAS")
PACKAGES = {"openblas": "scipy-openblas32", "mkl": "mkl"}

# What the loader says of the function that mlx now calls for a float32 product.
OWNERS = """
import ctypes, json, sys
from kvstow import blas

class Info(ctypes.Structure):
    _fields_ = [(n, t) for n, t in zip("abcd", [ctypes.c_char_p, ctypes.c_void_p] * 2)]

def owners():
    found = {}
    for slot, name in blas.blas_slots().items():
        info = Info()
        target = ctypes.c_void_p.from_address(slot)
        assert ctypes.CDLL(None).dladdr(target, ctypes.byref(info))
        found[name] = [info.a.decode(), info.c.decode() if info.c else None]
    return found
"""


def run(code, **environment):
    """The JSON that `code` prints in a fresh interpreter."""
    threads = (f"{library}_NUM_THREADS" for library in ("OPENBLAS", "MKL", "OMP"))
    for name in ("KVSTOW_BLAS", *threads):
        environment.setdefault(name, None)
    merged = {k: v for k, v in (dict(os.environ) | environment).items() if v is not None}
    command = [sys.executable, "-c", OWNERS + code]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=merged)
    return json.loads(out.stdout)


def skip_unless_installed(choice):
    try:
        importlib.metadata.version(PACKAGES[choice])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"pip install {PACKAGES[choice]}")


REPORT = """
report = blas.use_fast_blas()
print(json.dumps([report.name, report.active, report.notice, str(report.path), report.threads,
                  owners() if sys.platform == "linux" else None]))
"""


@on_linux_cpu
@pytest.mark.parametrize("choice", PACKAGES)
@pytest.mark.parametrize("before", ["", "import mlx.core\n"])
def test_every_product_of_mlx_goes_to_the_chosen_library(choice, before):
    skip_unless_installed(choice)
    name, active, notice, path, threads, owners = run(before + REPORT, KVSTOW_BLAS=choice)
    assert (name, active) == (choice, True)
    assert notice == f"BLAS: {choice}, threads: {threads} (KVSTOW_BLAS=off for mlx's own)"
    prefix = {"openblas": "scipy_", "mkl": ""}[choice]
    assert owners.keys() == set(FUNCTIONS)
    for function, (file, symbol) in owners.items():
        assert os.path.realpath(file) == path
        assert symbol.lower().startswith(prefix + function)  # MKL has aliases


@on_linux_cpu
def test_products_pass_through_the_pointers_that_are_replaced():
    """With a function that computes nothing in their place, a product is no product."""
    code = """
import mlx.core as mx, numpy as np
slots = [slot for slot, name in blas.blas_slots().items() if name == "cblas_sgemm"]
nothing = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p).value
blas._point(dict.fromkeys(slots, nothing))
a = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
print(json.dumps(bool(np.allclose(np.array(mx.array(a) @ mx.array(a)), a @ a))))
"""
    assert run(code) is False


@on_linux_cpu
def test_a_library_that_gives_wrong_products_is_taken_out_again():
    skip_unless_installed("openblas")
    code = """
import mlx.core
before = owners()
blas._products_are_right = lambda mx: False
report = blas.use_fast_blas()
print(json.dumps([report.active, report.notice, owners() == before]))
"""
    active, notice, restored = run(code)
    assert (active, restored) == (False, True)
    assert "gave wrong products" in notice


@on_linux_cpu
def test_the_check_finds_a_wrong_product():
    code = """
import mlx.core as mx
class Wrong:
    def __getattr__(self, name): return getattr(mx, name)
    def array(self, a, dtype): return mx.array(a, dtype) * 1.01
print(json.dumps([blas._products_are_right(mx), blas._products_are_right(Wrong())]))
"""
    assert run(code) == [True, False]


def test_off_leaves_mlx_as_it_is():
    name, active, notice, _, _, owners = run(REPORT, KVSTOW_BLAS="off")
    assert (name, active, notice) == ("bundled", False, "BLAS: mlx's own (KVSTOW_BLAS=off)")
    assert not owners or not any(file.endswith("openblas.so") for file, _ in owners.values())


NOT_INSTALLED = """
def files(package): raise blas.importlib.metadata.PackageNotFoundError(package)
blas.importlib.metadata.files = files
"""
WRONG_PRODUCTS = "blas._products_are_right = lambda mx: False\n"
ERROR = """
try: said = blas.use_fast_blas().notice
except blas.KvstowError as error: said = str(error)
print(json.dumps(said))
"""


@on_linux_cpu
def test_auto_names_the_command_for_a_library_where_none_is_installed():
    notice = run(NOT_INSTALLED + ERROR)
    assert notice == "BLAS: mlx's own (slow; for a fast one: pip install scipy-openblas32)"


@on_linux_cpu
@pytest.mark.parametrize("choice", PACKAGES)
def test_a_named_library_that_is_not_installed_is_an_error_with_its_command(choice):
    said = run(NOT_INSTALLED + ERROR, KVSTOW_BLAS=choice)
    assert said.startswith(f"KVSTOW_BLAS={choice} cannot be done: it is not installed")
    assert f"pip install {PACKAGES[choice]}" in said


@on_linux_cpu
@pytest.mark.parametrize("choice", PACKAGES)
def test_a_named_library_that_cannot_be_used_is_an_error(choice):
    skip_unless_installed(choice)
    assert "gave wrong products" in run(WRONG_PRODUCTS + ERROR, KVSTOW_BLAS=choice)


@on_linux_cpu
def test_one_processor_is_left_free_unless_the_number_of_threads_is_set():
    skip_unless_installed("openblas")
    code = """
import os
os.sched_getaffinity = lambda _: set(range(3))
blas._available_cpus = lambda: 3
print(json.dumps(blas.use_fast_blas().threads))
"""
    assert run(code) == 2
    assert run(code, OPENBLAS_NUM_THREADS="1") == 1
    assert run(code, OMP_NUM_THREADS="1") == 1


@on_linux_cpu
def test_a_page_that_stays_read_only_leaves_every_pointer_as_it_was():
    slot = ctypes.c_void_p(7)
    with pytest.raises(OSError, match="mprotect"):
        blas._point({ctypes.addressof(slot): 1, 0: 1})  # nothing is mapped at address 0
    assert slot.value == 7


PROGRAM_HEADER, DYNAMIC, TABLES = 64, 128, 256


def elf_image(tags, tables=b"", kind=2):
    """An ELF image in memory with one program header, a dynamic section and what it leads to."""
    image = bytearray(TABLES)
    image[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", image, 32, PROGRAM_HEADER)
    struct.pack_into("<H", image, 56, 1)
    struct.pack_into("<II6Q", image, PROGRAM_HEADER, kind, 0, 0, DYNAMIC, 0, 0, 16 * len(tags), 0)
    for i, tag in enumerate(tags.items()):
        struct.pack_into("<QQ", image, DYNAMIC + 16 * i, *tag)
    return bytes(image) + tables


STRTAB, SYMTAB, RELA, RELASZ = 5, 6, 7, 8
RELOCATION = struct.pack("<QQq", 0, 6 if blas.platform.machine() == "x86_64" else 1025, 0)
NOT_ELF, NO_DYNAMIC, NO_TAGS = bytes(TABLES), elf_image({}, kind=1), elf_image({})
NO_SIZE = elf_image({RELA: TABLES})
HALF_AN_ENTRY = elf_image({RELA: TABLES, RELASZ: 23}, RELOCATION)
NO_SYMBOLS = elf_image({RELA: TABLES, RELASZ: 24}, RELOCATION)
NOT_UTF8 = elf_image(
    {RELA: TABLES, RELASZ: 24, SYMTAB: TABLES + 24, STRTAB: TABLES + 28},
    RELOCATION + bytes(4) + b"\xff\xfe\0",
)


@on_linux_cpu
@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (NOT_ELF, "no 64-bit ELF"),
        (NO_DYNAMIC, "no dynamic section"),
        (NO_TAGS, "in another way"),
        (NO_SIZE, "KeyError"),
        (HALF_AN_ENTRY, "multiple of 24"),
        (NO_SYMBOLS, "KeyError"),
        (NOT_UTF8, "in another way"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_an_image_that_is_not_as_expected_is_left_alone(monkeypatch, image, reason):
    buffer = ctypes.create_string_buffer(image)
    monkeypatch.setattr(blas, "_base_address", lambda _: ctypes.addressof(buffer))
    assert reason in blas._install(blas._LIBRARIES[0], Path("libc.so.6"), None)
    assert buffer.raw[:-1] == image


def test_there_is_nothing_to_say_on_macos_on_a_gpu_or_without_mlx(monkeypatch):
    import_module = blas.importlib.import_module
    gpu = type("Mlx", (), {"cpu": "cpu", "default_device": staticmethod(lambda: "gpu")})
    monkeypatch.setattr(blas.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(blas.sys, "platform", "darwin")
    assert blas._decide("auto").notice == ""
    with pytest.raises(KvstowError, match="KVSTOW_BLAS=mkl cannot be done: only mlx on a CPU"):
        blas._decide("mkl")
    monkeypatch.setattr(blas.sys, "platform", "linux")
    monkeypatch.setattr(blas.importlib, "import_module", lambda _: gpu)
    assert blas._decide("auto").notice == ""
    with pytest.raises(KvstowError, match="KVSTOW_BLAS=openblas cannot be done: only mlx on a CPU"):
        blas._decide("openblas")
    monkeypatch.setattr(blas.importlib, "import_module", lambda _: import_module("mlx.nothing"))
    assert blas._decide("auto").notice == ""


@on_linux_cpu
def test_a_machine_that_is_not_known_is_left_alone():
    code = """
blas.platform.machine = lambda: "riscv64"
print(json.dumps(blas.use_fast_blas().notice))
"""
    assert "riscv64" in run(code)


def test_an_unknown_choice_is_refused_with_those_allowed(monkeypatch):
    monkeypatch.setenv("KVSTOW_BLAS", "atlas")
    with pytest.raises(KvstowError, match="one of auto, off, openblas, mkl; got 'atlas'"):
        use_fast_blas()


def test_the_second_call_repeats_the_first_report():
    assert use_fast_blas() is use_fast_blas()

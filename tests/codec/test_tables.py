"""The tables are the checked-in constants, and the signs are what their seed says."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kvstow.codec import tables
from kvstow.scheme import HEAD_DIMS, VALUE_BITS

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_tables", TOOLS / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_module_is_what_its_tool_writes(tool):
    text = Path(tables.__file__).read_text(encoding="utf-8")
    assert text == tool.format_tables(tool.ARCHIVE)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_tables_survive_being_printed_as_decimals_bit_for_bit(bits):
    with np.load(TOOLS / "tables.npz") as archive:
        assert archive[f"centroids_{bits}"].tobytes() == tables.CENTROIDS[bits].tobytes()
        assert archive[f"boundaries_{bits}"].tobytes() == tables.BOUNDARIES[bits].tobytes()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_signs_survive_being_printed_as_bits(head_dim):
    with np.load(TOOLS / "tables.npz") as archive:
        np.testing.assert_array_equal(tables.SIGNS[head_dim], archive[f"sign_{head_dim}"])
    assert tables.SIGNS[head_dim].dtype == np.float32


@pytest.mark.mlx
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_signs_are_the_random_bits_of_key_42(head_dim):
    mx = pytest.importorskip("mlx.core")
    bits = np.array(mx.random.randint(0, 2, (head_dim,), key=mx.random.key(42)))
    np.testing.assert_array_equal(tables.SIGNS[head_dim], 1 - 2 * bits)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_every_boundary_lies_between_its_centroids(bits):
    centroids, boundaries = tables.CENTROIDS[bits], tables.BOUNDARIES[bits]
    assert len(centroids) == 2**bits == len(boundaries) + 1
    assert (centroids[:-1] < boundaries).all()
    assert (boundaries < centroids[1:]).all()

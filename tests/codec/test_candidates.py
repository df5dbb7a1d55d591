"""The table of errors: what it says is the error, and no sum of it overflows its 16 bits."""

import numpy as np
import pytest

from kvstow.codec.affine import code_range
from kvstow.codec.candidates import UNIT, in_words, least_of, middles
from kvstow.codec.search import (
    LARGEST_UNIT,
    MULTIPLES,
    PARITY,
    PHASES,
    STEPS,
    key_candidates,
    value_candidates,
)
from kvstow.codec.tables import BOUNDARIES, CENTROIDS
from kvstow.scheme import GROUP_SIZE, VALUE_BITS


def errors_in(table):
    """Whole numbers by candidate and place."""
    halves = table.words.astype("<u8").view("<u2").reshape(*table.words.shape, -1)
    return halves.transpose(0, 2, 1).reshape(-1, table.words.shape[1]).astype(np.int64)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_no_group_of_values_can_overflow_a_sum(bits):
    table = value_candidates(bits)
    errors = errors_in(table).astype(np.float64)
    units = middles(-LARGEST_UNIT, LARGEST_UNIT, table.resolution)
    inner = np.maximum(np.abs(units) - 0.5 / table.resolution, 0)  # the least of each place
    # The squares of a group sum to 32. So for any c, errors sum to at most
    # 32 * max(error - c * unit**2) + 32 * c: the least of these bounds is taken.
    bounds = [(errors - c * inner**2).max(axis=1) + c for c in np.linspace(0, 2 * UNIT, 200)]
    assert GROUP_SIZE * np.min(bounds, axis=0).max() < 2**16
    assert errors.max() < 2**16


def test_no_group_of_keys_can_overflow_a_sum():
    table = key_candidates()
    low, high = code_range(8)
    # The range takes STEPS steps, float16 rounds them by up to 2**-10 of it at the least
    # scale that is searched, and the zero is whole to half a step.
    ends = STEPS * (1 + 2.0**-10) / 2 + 0.5
    steps = middles(low - 2, high + 2, table.resolution)
    reachable = np.abs(steps - (low + high) / 2) < ends + 1 / table.resolution
    assert GROUP_SIZE * errors_in(table)[:, reachable].max() < 2**16


def test_the_table_of_keys_holds_the_squared_error_of_every_phase(rng):
    table = key_candidates()
    low, high = code_range(8)
    steps = rng.uniform(low - 1, high + 1, 5000).astype(np.float32)
    places = (steps * table.resolution + table.shift).astype(int)
    for phase, errors in zip(PHASES, errors_in(table), strict=True):
        code = np.clip(np.rint(steps - phase), low, high)
        want = (steps - (code + phase)) ** 2
        # Within half a place, and half a unit.
        allowed = 2 * np.sqrt(want) / 32 + 1 / 32**2 + 1 / UNIT + 1 / 32
        assert (np.abs(errors[places] / UNIT - want) <= allowed).all()


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_the_table_of_values_holds_the_squared_error_of_every_multiple(bits, rng):
    table = value_candidates(bits)
    units = rng.uniform(-5, 5, 5000).astype(np.float32)
    places = (units * table.resolution + table.shift).astype(int)
    for multiple, errors in zip(MULTIPLES, errors_in(table), strict=True):
        level = CENTROIDS[bits][np.searchsorted(BOUNDARIES[bits], units / multiple)] * multiple
        want = (units - level) ** 2
        allowed = (2 * np.sqrt(want) + 0.01) / 256 + 1 / UNIT + 2e-2 * (want > 0.01)
        assert (np.abs(errors[places] / UNIT - want) <= allowed).mean() > 0.98
    assert MULTIPLES[PARITY] == 1


def test_of_equal_candidates_the_first_is_taken():
    eighths = [[3, 1], [2, 2], [2, 2], [3, 1], [2, 2], [2, 1], [9, 9], [9, 9]]
    words = in_words(np.array(eighths) / 8)
    places = np.zeros((3, 32), np.float32)
    places[1] = 1
    places[2, :16] = 1
    assert least_of(places, words).tolist() == [1, 0, 5]


def test_what_is_no_place_is_given_some_candidate():
    places = np.full((2, 32), np.nan, np.float32)
    places[1] = 1e9
    with np.errstate(invalid="ignore"):
        assert (least_of(places, value_candidates(3).words) < len(MULTIPLES)).all()

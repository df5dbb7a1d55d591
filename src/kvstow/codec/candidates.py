"""Which of several ways to code a group errs least, in numpy: part of the definition.

An element's squared error under every candidate is read from a table, at the element's
place: which of many narrow intervals it lies in. The table holds whole numbers, four
candidates of 16 bits in one word, so that one sum of words adds a group's errors under
four candidates, exactly and in any order. A backend needs one look-up where it would
else round and square once per candidate, and cannot differ from another by a bit.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt32, UInt64

# A squared error of 1 in the table. The greatest sum of a group is below 2**16 / UNIT = 128,
# which `tests/codec/test_candidates.py` proves for the tables of `search`.
UNIT = 512
PER_WORD = 4


class Candidates(NamedTuple):
    """A table of squared errors, and how to find an element's place in it.

    Attributes:
        words: The errors by place, `PER_WORD` candidates in each, the first one lowest.
        resolution: Places per unit of the elements.
        shift: The place of an element 0.
    """

    words: UInt64[np.ndarray, "w p"]
    resolution: int
    shift: int


def middles(low: int, high: int, resolution: int) -> Float[np.ndarray, " p"]:
    """What stands for the elements of each place from `low` to `high`: float64."""
    return low + (np.arange((high - low) * resolution) + 0.5) / resolution


def in_words(errors: Float[np.ndarray, "c p"]) -> UInt64[np.ndarray, "c//4 p"]:
    """Squared errors of each candidate at each place, as `Candidates` stores them."""
    whole = np.rint(errors * UNIT).astype("<u2")
    by_word = whole.reshape(-1, PER_WORD, whole.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(by_word).view("<u8")[..., 0].astype(np.uint64)


def least_of(
    places: Float32[np.ndarray, "*b g 32"], words: UInt64[np.ndarray, "w p"]
) -> UInt32[np.ndarray, "*b g"]:
    """The candidate of the least squared error for each group; of equal ones the first.

    Args:
        places: Of each element, not yet rounded down. A group with one that is not a place
            of the table, or NaN, is given an arbitrary candidate.
        words: As in `Candidates`.
    """
    at = np.minimum(places.astype(np.uint16), words.shape[1] - 1)
    sums = np.stack([word[at].sum(axis=-1) for word in words], axis=-1)
    errors = sums.astype("<u8").view("<u2").astype(np.uint32)
    n = errors.shape[-1]
    ranked = errors * n + np.arange(n, dtype=np.uint32)  # no two alike
    least: np.ndarray = ranked.min(axis=-1) % n
    return least

"""Where units lie among sorted edges, on MLX arrays: `numpy.searchsorted` of many elements."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from jaxtyping import Float32, UInt8, UInt16

MOST_SWEPT = 15  # edges
CELLS_PER_UNIT = 512  # a power of two: a unit is brought to a cell with one rounding


class Edges(NamedTuple):
    """Edges, and cells of a uniform grid that say where to begin looking.

    A cell is ``1 / CELLS_PER_UNIT`` wide and `shift` cells lie below 0. `starts` counts the
    edges in the cells below: never too many for a unit in this cell, at most `n_steps` too few.
    """

    edges: Float32[mx.array, " c"]
    edges_and_inf: Float32[mx.array, " c+1"]
    starts: UInt16[mx.array, " n"]
    shift: float
    n_steps: int
    swept: tuple[float, ...]  # the edges, where they are few

    @classmethod
    def of(cls, edges: Float32[np.ndarray, " c"]) -> "Edges":
        """From sorted edges, no two of them equal."""
        shift = np.float32(np.ceil(-edges[0] * CELLS_PER_UNIT) + 1)
        cells = (edges * np.float32(CELLS_PER_UNIT) + shift).astype(np.uint32)
        below = np.searchsorted(cells, np.arange(int(cells[-1]) + 2), side="left")
        return cls(
            edges=mx.array(edges),
            edges_and_inf=mx.array(np.append(edges, np.float32(np.inf))),
            starts=mx.array(below.astype(np.uint16)),
            shift=float(shift),
            n_steps=int(np.bincount(cells).max()),
            swept=tuple(edges.tolist()) if len(edges) <= MOST_SWEPT else (),
        )


def codes_of(units: Float32[mx.array, "*b"], among: Edges) -> UInt8[mx.array, "*b"]:
    """See `search.count_below`."""
    flat = units.reshape(-1)
    below = places_of(flat, among).astype(mx.uint8)
    return (below * (flat == flat).view(mx.uint8)).reshape(units.shape)  # NaN: 0


def places_of(units: Float32[mx.array, " n"], among: Edges) -> mx.array:
    """How many edges lie strictly below each unit; below NaN, any number of them."""
    if units.size <= 4096:
        return mx.searchsorted(among.edges, units)
    # Searching mispredicts half its branches. Many elements take one sweep per edge, or, of
    # many edges, start where their cell does, and step as often as the fullest cell has edges.
    if among.swept:
        below = (units > among.swept[0]).view(mx.uint8)
        for edge in among.swept[1:]:
            below = below + (units > edge).view(mx.uint8)
        return below
    last = among.starts.size - 1
    cells = mx.clip(units * CELLS_PER_UNIT + among.shift, 0, last)
    # Of NaN the cast makes an arbitrary number, which must not be read at.
    cells = mx.minimum(cells.astype(mx.uint32), last)
    places = mx.take_along_axis(among.starts, cells, axis=0)
    for _ in range(among.n_steps):
        beyond = units > mx.take_along_axis(among.edges_and_inf, places, axis=0)
        places = places + beyond.view(mx.uint8)
    return places

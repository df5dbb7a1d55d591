"""The best scalar code for one coordinate of a random direction, computed exactly.

A coordinate of a uniform point on the sphere of ``d`` dimensions has a density
proportional to ``(1 - x**2) ** ((d - 3) / 2)``; with ``x = sin t`` that is
``cos(t) ** (d - 2)``, which quadrature likes for any ``d``. The best centroids are
the means of their own cells (Lloyd 1982, Max 1960).
"""

import math
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
TAIL = 12  # standard deviations of a coordinate, beyond which less than 1e-30 lies
LLOYD_STEPS, NEWTON_STEPS = 10, 5  # to the last bits, for 1 to 8 bits and any dimension


class Codebook(NamedTuple):
    """Centroids in ascending order, float32, and the boundaries between them.

    `mse` is the mean of ``|x - x'|**2`` over unit vectors ``x`` of which every coordinate
    is coded.
    """

    centroids: np.ndarray
    boundaries: np.ndarray
    mse: float


@cache
def codebook(bits: int, head_dim: int) -> Codebook:
    """Lloyd and Max's for a coordinate of a random unit vector of `head_dim` elements.

    >>> [round(codebook(bits, 128).mse, 5) for bits in range(1, 5)]
    [0.36089, 0.116, 0.03397, 0.00931]
    """
    # The levels of Panter and Dite for the normal limit, kept inside the sphere.
    limit = NormalDist(sigma=math.sqrt(3 / head_dim))
    centroids = np.tanh([limit.inv_cdf((i + 0.5) / 2**bits) for i in range(2**bits)])
    for _ in range(LLOYD_STEPS):
        centroids = _cells(centroids, head_dim).means
    for _ in range(NEWTON_STEPS):
        centroids = _newton_step(centroids, head_dim)
    cells = _cells(centroids, head_dim)
    # Each centroid is the mean of its cell, and a coordinate's mean square is 1 / head_dim.
    mse = 1 - head_dim * float(cells.masses @ centroids**2 / cells.masses.sum())
    return Codebook(centroids.astype(np.float32), cells.boundaries.astype(np.float32), mse)


class _Cells(NamedTuple):
    """What each centroid is nearest to: one mass and mean per centroid, a boundary between two."""

    masses: np.ndarray
    means: np.ndarray
    boundaries: np.ndarray
    densities: np.ndarray  # at the boundaries; in the unit of the masses


def _cells(centroids: np.ndarray, head_dim: int) -> _Cells:
    boundaries = (centroids[1:] + centroids[:-1]) / 2
    end = min(math.pi / 2, TAIL / math.sqrt(head_dim))
    inner = np.arcsin(boundaries)
    edges = np.concatenate([[-end], inner, [end]])
    middles, halves = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    angles = middles[:, None] + halves[:, None] * NODES
    mass = np.cos(angles) ** (head_dim - 2) * halves[:, None] * WEIGHTS
    masses = mass.sum(axis=1)
    means = (mass * np.sin(angles)).sum(axis=1) / masses
    return _Cells(masses, means, boundaries, np.cos(inner) ** (head_dim - 3))


def _newton_step(centroids: np.ndarray, head_dim: int) -> np.ndarray:
    """Towards centroids that equal the means; Lloyd's own step is slow for many levels."""
    masses, means, boundaries, densities = _cells(centroids, head_dim)
    # How the mean below and above a boundary moves with either centroid beside it.
    below = densities * (boundaries - means[:-1]) / masses[:-1] / 2
    above = densities * (means[1:] - boundaries) / masses[1:] / 2
    slopes = np.diag(np.append(below, 0) + np.insert(above, 0, 0))
    slopes += np.diag(below, 1) + np.diag(above, -1)
    moved: np.ndarray = centroids - np.linalg.solve(
        np.eye(len(centroids)) - slopes, centroids - means
    )
    return moved

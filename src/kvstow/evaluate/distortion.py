"""How far a quantiser moves random unit vectors, in the measures of the TurboQuant paper.

It ranks codes for data without structure. What a scheme costs a model is `kl`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float32

from kvstow.codec.reference import decode_keys, decode_values, encode_keys, encode_values
from kvstow.scheme import GROUP_SIZE


class Quantiser(Protocol):
    """What codes vectors of `head_dim` elements and reads them back."""

    @property
    def head_dim(self) -> int:
        """Elements of a vector."""

    @property
    def bits_per_value(self) -> float:
        """Bits stored for one element, with its share of all metadata."""

    def reconstruct(self, x: np.ndarray) -> np.ndarray:
        """What is read back of `x`."""


class Distortion(NamedTuple):
    """Means over random unit vectors ``x``, read back as ``x'``, and unit ``y``."""

    mse: float  # |x - x'|**2, the paper's D_mse
    product: float  # d * (<y, x> - <y, x'>)**2, the paper's D_prod times d
    parallel: float  # the same for y = x, where a bias shows
    gain: float  # <x, x'>: 1 if inner products are unbiased


def distortion(quantiser: Quantiser, n_vectors: int = 1024, seed: int = 0) -> Distortion:
    """Measure `quantiser` on `n_vectors` vectors, and as many ``y`` for each of them.

    The error of the mean is about one part in the square root of
    ``n_vectors * head_dim`` for one random matrix; matrices differ, too.
    """
    rng = np.random.default_rng(seed)
    x, y = (unit_vectors(rng, n_vectors, quantiser.head_dim) for _ in range(2))
    rebuilt = quantiser.reconstruct(x)
    errors = x - rebuilt
    along = (x * errors).sum(axis=-1)
    return Distortion(
        mse=_mean(errors**2) * quantiser.head_dim,
        product=_mean((y @ errors.T) ** 2) * quantiser.head_dim,
        parallel=_mean(along**2) * quantiser.head_dim,
        gain=1 - _mean(along),
    )


def unit_vectors(rng: np.random.Generator, n: int, head_dim: int) -> Float32[np.ndarray, "n d"]:
    """`n` directions, uniform over the sphere."""
    x = rng.standard_normal((n, head_dim))
    units: np.ndarray = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return units.astype(np.float32)


@dataclass(frozen=True)
class Keys:
    """kvstow's key format as a `Quantiser`."""

    bits: int
    head_dim: int
    search: bool = False

    @property
    def bits_per_value(self) -> float:
        """Codes, and the scale and zero of a group."""
        return self.bits + 32 / GROUP_SIZE

    def reconstruct(self, x: np.ndarray) -> np.ndarray:
        """What a cache reads back of `x`."""
        packed = encode_keys(x, bits=self.bits, guard=True, search=self.search)
        return decode_keys(packed, bits=self.bits)


@dataclass(frozen=True)
class Values:
    """kvstow's value format as a `Quantiser`."""

    bits: int
    head_dim: int
    search: bool = False

    @property
    def bits_per_value(self) -> float:
        """Codes, and the scale of a group."""
        return self.bits + 16 / GROUP_SIZE

    def reconstruct(self, x: np.ndarray) -> np.ndarray:
        """What a cache reads back of `x`."""
        packed = encode_values(x, bits=self.bits, guard=True, search=self.search)
        return decode_values(packed, bits=self.bits, head_dim=self.head_dim)


def _mean(x: np.ndarray) -> float:
    return float(x.mean(dtype=np.float64))

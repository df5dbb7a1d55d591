"""The two quantisers of the TurboQuant paper, as arms of a comparison.

Never a cache format. They code a vector as a whole, with one norm, against dense
random matrices, as the paper does and kvstow's codec does not. Any leading axes;
plain numpy in float32, and `paper_mlx` is the same on MLX arrays.
Source: Zandieh, Daliri, Hadian, Mirrokni, arXiv:2504.19874, algorithms 1 and 2.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Float16, Float32

from kvstow.codec.reference import FLOAT16_MAX
from kvstow.errors import SchemeError, UnsupportedModel
from kvstow.evaluate.lloyd_max import codebook

BITS = range(1, 9)
NORM_BITS = 16  # a norm is stored in float16


@dataclass(frozen=True)
class TurboQuantMse:
    """Algorithm 1: a random rotation, then the best scalar code of each coordinate.

    Raises:
        SchemeError: If `bits` is not one of 1 to 8, or `head_dim` is below 2.
    """

    bits: int
    head_dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.bits, self.head_dim)

    @property
    def bits_per_value(self) -> float:
        """Bits stored for one element, with its share of the norm."""
        return self.bits + NORM_BITS / self.head_dim

    @property
    def exact_mse(self) -> float:
        """The mean of ``|x - x'|**2`` over unit vectors, but for the rounding of the norm."""
        return codebook(self.bits, self.head_dim).mse

    def reconstruct(self, x: Float[np.ndarray, "*b d"]) -> Float32[np.ndarray, "*b d"]:
        """What is read back of finite `x`; a norm beyond float16 is stored as the largest.

        Raises:
            UnsupportedModel: If the last axis of `x` is not `head_dim`.
        """
        check_axis(x.shape, self.head_dim)
        x = x.astype(np.float32)
        centroids, boundaries, _ = codebook(self.bits, self.head_dim)
        matrix = rotation(self.head_dim, self.seed)
        norms = np.linalg.norm(x, axis=-1, keepdims=True)
        units = x / np.where(norms == 0, 1, norms)
        codes = np.searchsorted(boundaries, units @ matrix.T)
        rebuilt: np.ndarray = centroids[codes] @ matrix * _stored(norms)
        return rebuilt


@dataclass(frozen=True)
class TurboQuantProd:
    """Algorithm 2: `TurboQuantMse` with one bit less, then the signs of the projected residual.

    Inner products with what is read back are right on average over the projections.
    At one bit there is no first stage, and the residual is the vector itself.

    Raises:
        SchemeError: If `bits` is not one of 1 to 8, or `head_dim` is below 2.
    """

    bits: int
    head_dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.bits, self.head_dim)

    @property
    def first(self) -> TurboQuantMse | None:
        """The stage whose residual the signs code."""
        return TurboQuantMse(self.bits - 1, self.head_dim, self.seed) if self.bits > 1 else None

    @property
    def bits_per_value(self) -> float:
        """Bits stored for one element, with its share of the residual's norm and the vector's."""
        before = self.first.bits_per_value if self.first else 0
        return before + 1 + NORM_BITS / self.head_dim

    @property
    def exact_mse(self) -> float:
        """The mean of ``|x - x'|**2`` over unit vectors and projections, but for rounded norms.

        Given the residual ``r``, each of the ``d`` rows of the projection estimates
        ``<y, r>`` with second moment ``pi/2 |y|**2 |r|**2``, and `reconstruct` takes the
        mean of the rows: its variance is ``(pi/2 |y|**2 |r|**2 - <y, r>**2) / d``. Over
        unit ``y`` the mean of ``<y, r>**2`` is ``|r|**2 / d``.
        """
        residual = self.first.exact_mse if self.first else 1.0
        return (math.pi / 2 - 1 / self.head_dim) * residual

    def reconstruct(self, x: Float[np.ndarray, "*b d"]) -> Float32[np.ndarray, "*b d"]:
        """What is read back of finite `x`; a norm beyond float16 is stored as the largest.

        Raises:
            UnsupportedModel: If the last axis of `x` is not `head_dim`.
        """
        check_axis(x.shape, self.head_dim)
        x = x.astype(np.float32)
        matrix = projection(self.head_dim, self.seed)
        coarse = self.first.reconstruct(x) if self.first else np.zeros_like(x)
        residual = x - coarse
        norms = np.linalg.norm(residual, axis=-1, keepdims=True)
        signs = np.where(residual @ matrix.T < 0, np.float32(-1), np.float32(1))
        rebuilt: np.ndarray = coarse + signs @ matrix * (sign_scale(self.head_dim) * _stored(norms))
        return rebuilt


def quantiser(name: str, head_dim: int) -> TurboQuantMse | TurboQuantProd:
    """The one that an arm calls `name`.

    >>> quantiser("prod3", 128)
    TurboQuantProd(bits=3, head_dim=128, seed=0)

    Raises:
        SchemeError: If `name` is not ``mse`` or ``prod`` and a digit from 1 to 8.
    """
    kind, bits = name[:-1], name[-1:]
    if kind not in ("mse", "prod") or bits not in map(str, BITS):
        raise SchemeError(f"expected mse<1..8> or prod<1..8>, got {name!r}")
    return (TurboQuantMse if kind == "mse" else TurboQuantProd)(int(bits), head_dim)


@cache
def rotation(head_dim: int, seed: int) -> Float32[np.ndarray, "d d"]:
    """A random orthogonal matrix, uniform over all of them."""
    q, r = np.linalg.qr(_rng(seed, 0).standard_normal((head_dim, head_dim)))
    # QR leaves the signs to the library; those of a positive diagonal make q uniform.
    return (q * np.sign(np.diag(r))).astype(np.float32)


@cache
def projection(head_dim: int, seed: int) -> Float32[np.ndarray, "d d"]:
    """A square matrix of unit normals, independent of `rotation` of the same seed."""
    return _rng(seed, 1).standard_normal((head_dim, head_dim), dtype=np.float32)


def sign_scale(head_dim: int) -> float:
    """Of the projected signs: it makes their inner products right on average."""
    return math.sqrt(math.pi / 2) / head_dim


def check_axis(shape: tuple[int, ...], head_dim: int) -> None:
    """Refuse an array whose last axis is not `head_dim`.

    Raises:
        UnsupportedModel: If it is not.
    """
    if not shape or shape[-1] != head_dim:
        raise UnsupportedModel(f"the last axis must have {head_dim} elements, got shape {shape}")


def _check(bits: int, head_dim: int) -> None:
    if bits not in BITS:
        raise SchemeError(f"bits must be one of {BITS[0]} to {BITS[-1]}, got {bits}")
    if head_dim < 2:
        raise SchemeError(f"head_dim must be at least 2, got {head_dim}")


def _stored(norms: Float32[np.ndarray, "*b 1"]) -> Float32[np.ndarray, "*b 1"]:
    stored: Float16[np.ndarray, "*b 1"] = np.minimum(norms, FLOAT16_MAX).astype(np.float16)
    return stored.astype(np.float32)


def _rng(seed: int, stream: int) -> np.random.Generator:
    # A spawned stream: default_rng([seed, 0]) would be default_rng(seed), from which data come.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))

"""`paper`, on MLX arrays.

Equal to it but for the rounding of matrix products: an element that lies on a
boundary, or a projection on zero, to within 1e-6 of the norm may take the other
code. CUDA multiplies float32 in TF32 unless MLX_ENABLE_TF32=0.
"""

from functools import cache

import mlx.core as mx

from kvstow.codec.reference import FLOAT16_MAX
from kvstow.evaluate import paper
from kvstow.evaluate.lloyd_max import codebook
from kvstow.evaluate.paper import TurboQuantMse, TurboQuantProd


def reconstruct(quantiser: TurboQuantMse | TurboQuantProd, x: mx.array) -> mx.array:
    """What `quantiser` reads back of `x` ``(..., head_dim)``, in float32. See its `reconstruct`.

    Raises:
        UnsupportedModel: If the last axis of `x` is not the quantiser's `head_dim`.
    """
    paper.check_axis(x.shape, quantiser.head_dim)
    x = x.astype(mx.float32)
    return _mse(quantiser, x) if isinstance(quantiser, TurboQuantMse) else _prod(quantiser, x)


def _mse(quantiser: TurboQuantMse, x: mx.array) -> mx.array:
    centroids, boundaries, matrix = _tables(quantiser)
    norms = mx.linalg.norm(x, axis=-1, keepdims=True)
    units = x / mx.where(norms == 0, 1, norms)
    codes = mx.searchsorted(boundaries, units @ matrix.T)
    rebuilt: mx.array = centroids[codes] @ matrix * _stored(norms)
    return rebuilt


def _prod(quantiser: TurboQuantProd, x: mx.array) -> mx.array:
    matrix = _projection(quantiser.head_dim, quantiser.seed)
    coarse = _mse(quantiser.first, x) if quantiser.first else mx.zeros_like(x)
    residual = x - coarse
    norms = mx.linalg.norm(residual, axis=-1, keepdims=True)
    signs = mx.where(residual @ matrix.T < 0, -1.0, 1.0)
    scale = paper.sign_scale(quantiser.head_dim)
    rebuilt: mx.array = coarse + signs @ matrix * (scale * _stored(norms))
    return rebuilt


@cache
def _tables(quantiser: TurboQuantMse) -> tuple[mx.array, mx.array, mx.array]:
    """Centroids, boundaries, rotation."""
    centroids, boundaries, _ = codebook(quantiser.bits, quantiser.head_dim)
    matrix = paper.rotation(quantiser.head_dim, quantiser.seed)
    return mx.array(centroids), mx.array(boundaries), mx.array(matrix)


@cache
def _projection(head_dim: int, seed: int) -> mx.array:
    return mx.array(paper.projection(head_dim, seed))


def _stored(norms: mx.array) -> mx.array:
    return mx.minimum(norms, FLOAT16_MAX).astype(mx.float16).astype(mx.float32)

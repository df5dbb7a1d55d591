import numpy as np
import pytest

from kvstow.errors import UnsupportedModel
from kvstow.evaluate.distortion import unit_vectors
from kvstow.evaluate.paper import TurboQuantMse, TurboQuantProd

mx = pytest.importorskip("mlx.core")
reconstruct = pytest.importorskip("kvstow.evaluate.paper_mlx").reconstruct
pytestmark = pytest.mark.mlx

BOTH = [TurboQuantMse, TurboQuantProd]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_mlx_reads_back_what_numpy_does(kind, bits, head_dim, rng):
    x = 3 * unit_vectors(rng, 2 * 3 * 50, head_dim).reshape(2, 3, 50, head_dim)
    quantiser = kind(bits, head_dim, seed=7)
    expected = quantiser.reconstruct(x)
    rebuilt = reconstruct(quantiser, mx.array(x))
    assert rebuilt.dtype == mx.float32
    away = np.linalg.norm(np.array(rebuilt) - expected, axis=-1)
    # Products are rounded in another order, so that an element on a boundary may take the
    # other code; in a vector without one, only the last bits and a float16 norm's differ.
    error = np.linalg.norm(x - expected, axis=-1)
    assert np.mean(away > 3 * 2.0**-10) <= 0.02
    assert np.all(away <= error + 3 * 2.0**-10)


@pytest.mark.parametrize("kind", BOTH)
def test_mlx_widens_bfloat16_and_keeps_zero(kind, rng):
    x = mx.array(unit_vectors(rng, 5, 64)).astype(mx.bfloat16)
    wide = np.array(x.astype(mx.float32))
    expected = kind(4, 64).reconstruct(wide)
    np.testing.assert_allclose(np.array(reconstruct(kind(4, 64), x)), expected, atol=0.02)
    assert not np.array(reconstruct(kind(4, 64), mx.zeros((2, 64)))).any()
    assert np.isfinite(np.array(reconstruct(kind(4, 64), mx.full((64,), 1e6)))).all()


@pytest.mark.parametrize("kind", BOTH)
def test_mlx_refuses_another_last_axis(kind):
    with pytest.raises(UnsupportedModel, match="last axis must have 64 elements"):
        reconstruct(kind(2, 64), mx.zeros((64, 65)))

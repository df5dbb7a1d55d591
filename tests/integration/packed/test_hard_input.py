"""Overflows, constants, half precision, and shapes that are refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvstow import UnsupportedModel

mx = pytest.importorskip("mlx.core")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
layer = pytest.importorskip("tests.integration.packed.layer")

pytestmark = pytest.mark.mlx
H, D = layer.H, layer.D
turbo, cut, decode, append = layer.turbo, layer.cut, layer.decode, layer.append
filled, assert_stores = layer.filled, layer.assert_stores


def test_a_model_that_overflows_is_counted_in_usage(cls, draw):
    tokens = draw(6)
    tokens.k[0, 1, 2, 40] = np.inf
    tokens.v[0, 0, 3, 7] = np.nan
    cache = filled(cls, cut(tokens, 0, 3))
    append(cache, cut(tokens, 3, 6))
    # The key's group, and both groups of the value: the rotation mixes them.
    assert integration.usage([cache]).nonfinite_groups == 1 + 2
    cache.trim(3)
    assert integration.usage([cache]).nonfinite_groups == 1
    cache.trim(1)
    assert integration.usage([cache]).nonfinite_groups == 0


def test_an_overflow_stays_in_its_own_token(cls, draw):
    tokens = draw(6)
    tokens.k[0, 1, 2, 40] = np.inf
    tokens.v[0, 1, 2, 7] = -np.inf
    cache = filled(cls, tokens)
    k, v = (np.array(x) for x in cache.keys_and_values())
    lost = np.zeros((1, H, 6), bool)
    lost[0, 1, 2] = True
    for x in (k, v):
        assert (~np.isfinite(x).all(axis=-1) == lost).all()


def test_sane_tokens_are_not_counted(cls, draw):
    cache = filled(cls, draw(300))
    assert integration.usage([cache]).nonfinite_groups == 0


@pytest.mark.parametrize("element", [0.0, 1e-7, 1.0, -3.0, 60000.0])
def test_constant_keys_and_values_come_back_finite(cls, element):
    x = mx.full((1, H, 3, D), element)
    cache = cls(turbo("turbo:k8v8"))
    cache.update_and_fetch(x, x)
    k, v = (np.array(x) for x in cache.keys_and_values())
    # 8 bits and float16 scales; a rotated constant is one large element among small ones.
    np.testing.assert_allclose(k, element, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(v, element, rtol=0.4, atol=1e-9)


def test_float16_tokens_are_clamped_to_float16(cls, rng):
    k = np.where(rng.random((1, H, 8, D)) < 0.5, -65504, 65504).astype(np.float16)
    cache = cls(turbo("turbo:k8v8"))
    cache.update_and_fetch(mx.array(k), mx.array(k))
    assert np.abs(decode(SimpleNamespace(k=k, v=k), cache.scheme).k).max() > 65504
    decoded_k, decoded_v = cache.keys_and_values()
    assert decoded_k.dtype == mx.float16
    assert mx.abs(decoded_k).max().item() == 65504
    assert mx.isfinite(decoded_v).all().item()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_tokens_are_widened_before_they_are_encoded(cls, draw, dtype):
    tokens = draw(7)
    k, v = (mx.array(x).astype(getattr(mx, dtype)) for x in (tokens.k, tokens.v))
    cache = cls(turbo())
    exact = cache.update_and_fetch(k, v)
    assert {x.dtype for x in exact} == {k.dtype}
    widened = SimpleNamespace(k=np.array(k.astype(mx.float32)), v=np.array(v.astype(mx.float32)))
    assert_stores(cache, widened)


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k8v3+start9"])
@pytest.mark.parametrize("head_dim", [32, 80, 96, 1024])
def test_a_head_dim_that_cannot_be_rotated_is_refused(cls, scheme, head_dim):
    cache, x = cls(turbo(scheme)), mx.zeros((1, H, 3, head_dim))
    with pytest.raises(UnsupportedModel, match=f"the model has {head_dim}"):
        cache.update_and_fetch(x, x)
    assert cache.empty()


def test_keys_and_values_of_different_widths_are_refused(cls):
    cache = cls(turbo())
    with pytest.raises(UnsupportedModel, match=r"128.*64"):
        cache.update_and_fetch(mx.zeros((1, H, 3, 128)), mx.zeros((1, H, 3, 64)))
    assert cache.empty()

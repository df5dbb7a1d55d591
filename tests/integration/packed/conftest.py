"""A layer of either class, and tokens for it."""

from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture(params=["eager", "deferred"])
def cls(request):
    """One of the two classes, while mlx-lm's attention would take its windows."""
    integration = pytest.importorskip("kvstow.integrations.mlx_lm")
    deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
    classes = {"eager": integration.PackedKVCache, "deferred": integration.DeferredKVCache}
    with deferred.installed():
        yield classes[request.param]


@pytest.fixture
def draw(rng):
    """Draws random keys and values ``(b, H, n_tokens, D)`` of float32."""
    layer = pytest.importorskip("tests.integration.packed.layer")

    def tokens(n_tokens, b=1):
        return SimpleNamespace(
            k=rng.standard_normal((b, layer.H, n_tokens, layer.D)).astype(np.float32),
            v=rng.standard_normal((b, layer.H, n_tokens, layer.D)).astype(np.float32),
        )

    return tokens

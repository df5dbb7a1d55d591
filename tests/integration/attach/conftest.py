"""Nothing of an attachment may be left behind by a test."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _the_global_is_mlx_lms_own_before_and_after():
    base = pytest.importorskip("mlx_lm.models.base")
    deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
    original = pytest.importorskip("tests.integration.attach.attached").ORIGINAL
    deferred.remove(deferred.Owner())  # what owners left that just went, in other tests
    assert base.quantized_scaled_dot_product_attention is original
    yield
    if deferred._owners:
        gc.collect()  # a test may have dropped an attached model that refers to itself
    assert not deferred._owners
    deferred.remove(deferred.Owner())

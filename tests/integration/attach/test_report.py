"""What `attach` reports: what is quantised, how it is fetched, and why the rest is not."""

import pytest

import kvstow
from kvstow import Scheme, UnsupportedModel

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
tiny = pytest.importorskip("tests.integration.tiny")
attached = pytest.importorskip("tests.integration.attach.attached")

pytestmark = pytest.mark.mlx
DeferredKVCache = integration.DeferredKVCache
build = tiny.build
OURS, EXPECTED = attached.OURS, attached.EXPECTED
layer_types = attached.layer_types


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_says_what_is_quantised_how_and_why_the_rest_is_not(name):
    fetch, quantised, kept = EXPECTED[name]
    model = build(name)
    before = layer_types(model)
    report = kvstow.attach(model, "turbo")
    assert report.scheme == Scheme.parse("turbo:k8v3")
    assert (report.fetch, report.kept) == (fetch, kept)
    assert [x.index for x in report.layers if x.quantised] == quantised
    assert report.n_quantised == len(quantised)
    assert bool(report.fetch_reason) == (fetch == "eager")
    assert report.as_dict() == {
        "quantised": len(quantised),
        "kept": len(before) - len(quantised),
        "reasons": kept,
    }
    assert str(report).startswith(f"turbo:k8v3: {len(quantised)} of {len(before)} layers, {fetch}")
    for layer, now, then in zip(report.layers, layer_types(model), before, strict=True):
        assert now is (OURS[fetch][then] if layer.quantised else then)
        assert layer.fetch == (fetch if layer.quantised else "host")
        kind = {host.KVCache: "full", host.RotatingKVCache: "sliding"}.get(then)
        assert layer.kind == (kind if layer.quantised else None)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma2", "expand_dims"),
        ("stablelm", "has no attribute 'astype'"),
    ],
)
def test_deferred_is_refused_with_the_reason_where_the_model_needs_arrays(name, why):
    model = build(name)
    with pytest.raises(UnsupportedModel, match=rf"cannot take packed windows: .*{why}"):
        kvstow.attach(model, "turbo", fetch="deferred")
    assert "make_cache" not in vars(model)
    assert why in kvstow.attach(model, "turbo").fetch_reason
    assert kvstow.attach(model, "turbo", fetch="eager").fetch_reason == ""


class Subclass(host.KVCache):
    """Somebody's own cache, which may store in any way."""


def test_only_mlx_lms_own_plain_cache_is_replaced_and_only_where_it_is_used():
    model = build("llama")
    model.make_cache = lambda: [host.KVCache(), Subclass(), host.KVCache()]
    report = kvstow.attach(model, "turbo")
    reasons = [layer.reason for layer in report.layers]
    assert reasons[0] == ""
    assert "Subclass" in reasons[1]
    assert reasons[2] == "the model stores nothing in this cache"
    assert [type(c) for c in model.make_cache()] == [DeferredKVCache, Subclass, host.KVCache]


class DecodesItself(nn.Module):
    """A layer's attention that asks its cache for arrays, whatever the cache returned."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x, mask=None, cache=None):
        b, n, _ = x.shape
        q, k, v = (
            project(x).reshape(b, n, -1, 64).transpose(0, 2, 1, 3)
            for project in (self.inner.q_proj, self.inner.k_proj, self.inner.v_proj)
        )
        cache.update_and_fetch(k, v)
        k, v = cache.keys_and_values()
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        return self.inner.o_proj(out.transpose(0, 2, 1, 3).reshape(b, n, -1))


def test_a_model_whose_packed_windows_go_unused_is_fetched_eagerly():
    model = build("llama")
    model.layers[1].self_attn = DecodesItself(model.layers[1].self_attn)
    report = kvstow.attach(model, "turbo")
    assert report.fetch == "eager"
    assert report.fetch_reason == "2 of 4 packed windows reached mlx-lm's own attention"


@pytest.mark.parametrize("scheme", [None, "off"])
def test_off_detaches_and_reports_that_it_is_off(scheme):
    model = build("llama")
    kvstow.attach(model, "turbo")
    report = kvstow.attach(model, scheme)
    assert "make_cache" not in vars(model)
    assert (report.n_quantised, report.kept) == (0, {"the scheme is off": [0, 1]})
    assert str(report).startswith("off: 0 of 2 layers, host")

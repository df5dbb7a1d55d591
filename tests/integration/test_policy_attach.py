"""Layers of one model under different schemes: each as it would be under its own."""

import gc

import numpy as np
import pytest

import kvstow
from kvstow.errors import PolicyError, UnsupportedModel
from kvstow.policy import Policy

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx_lm.models import cache as host  # noqa: E402

from kvstow.integrations.mlx_lm import deferred  # noqa: E402
from kvstow.integrations.mlx_lm.cache import PackedKVCache  # noqa: E402
from tests.integration.tiny import VOCAB, Definition, build  # noqa: E402


@pytest.fixture(autouse=True)
def _no_attached_model_is_left():
    yield
    if deferred._owners:
        gc.collect()  # a test may have dropped an attached model that refers to itself
    assert not deferred._owners
    deferred.remove(deferred.Owner())  # mlx-lm has its own back, also after owners that just went


TWO = Policy.from_dict({"rules": [{"layers": 1, "scheme": "turbo:k4v8"}]})


def logits_of(model, cache, lengths=(12, 1, 3, 1)):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, sum(lengths)))
    found, start = [], 0
    for n in lengths:
        found.append(np.array(model(mx.array(tokens[:, start : start + n]), cache=cache)))
        start += n
    return np.concatenate(found, axis=1)


def schemes_in(caches):
    return [str(c.scheme) if isinstance(c, PackedKVCache) else type(c).__name__ for c in caches]


def test_each_layer_is_under_the_scheme_that_the_policy_says():
    model = build("llama")
    report = kvstow.attach(model, TWO)
    assert report.scheme is TWO
    assert [str(layer.scheme) for layer in report.layers] == ["turbo:k8v3", "turbo:k4v8"]
    assert schemes_in(host.make_prompt_cache(model)) == ["turbo:k8v3", "turbo:k4v8"]
    assert report.as_dict()["schemes"] == {"turbo:k8v3": [0], "turbo:k4v8": [1]}
    assert "turbo:k4v8 1 (1)" in str(report)


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_logits_are_those_of_the_definition_of_each_layers_scheme(fetch):
    model = build("llama")
    with kvstow.attached(model, TWO, fetch=fetch) as report:
        got = logits_of(model, host.make_prompt_cache(model))
    defined = [Definition(layer.scheme) for layer in report.layers]
    np.testing.assert_allclose(got, logits_of(model, defined), atol=2e-4)


def test_a_layer_that_the_policy_leaves_out_keeps_its_cache_and_is_reported():
    model = build("llama")
    policy = Policy.from_dict({"rules": [{"layers": 0, "scheme": "off"}]})
    report = kvstow.attach(model, policy)
    assert report.kept == {"the policy says off": [0]}
    assert schemes_in(host.make_prompt_cache(model)) == ["KVCache", "turbo:k8v3"]


def test_turbo_and_affine_layers_run_beside_each_other():
    model = build("llama")
    mixed = Policy.from_dict({"rules": [{"layers": 0, "scheme": "affine:8"}]})
    report = kvstow.attach(model, mixed)
    assert [layer.fetch for layer in report.layers] == ["host", "deferred"]
    caches = host.make_prompt_cache(model)
    assert np.isfinite(logits_of(model, caches)).all()
    assert isinstance(caches[0], host.QuantizedKVCache)


def test_converted_caches_follow_the_policy_too():
    model = build("llama")
    plain = host.make_prompt_cache(model)
    logits_of(model, plain)
    kvstow.attach(model, TWO)
    converted = model.make_cache.convert(plain)
    assert schemes_in(converted) == ["turbo:k8v3", "turbo:k4v8"]


def test_bytes_are_the_sum_of_what_each_scheme_takes():
    def n_bytes(scheme):
        model = build("llama")
        kvstow.attach(model, scheme)
        cache = host.make_prompt_cache(model)
        logits_of(model, cache)
        return kvstow.usage(cache).kv_bytes

    one, other = n_bytes("turbo:k8v3"), n_bytes("turbo:k4v8")
    assert one != other
    assert n_bytes(TWO) == (one + other) / 2


@pytest.mark.parametrize(
    ("rules", "error", "said"),
    [
        ([{"layers": 7, "scheme": "off"}], PolicyError, "names layers 7"),
        ([{"kind": "sliding", "scheme": "off"}], PolicyError, "names no layer"),
        ([{"kind": "full", "scheme": "off"}], UnsupportedModel, "apply to no layer"),
    ],
)
def test_a_policy_that_does_not_suit_the_model_is_refused_and_changes_nothing(rules, error, said):
    model = build("llama")
    kvstow.attach(model, "turbo:k8v8")
    with pytest.raises(error, match=said):
        kvstow.attach(model, Policy.from_dict({"rules": rules}))
    assert schemes_in(host.make_prompt_cache(model)) == ["turbo:k8v8"] * 2


def test_a_policy_with_a_kind_reaches_every_layer_of_it():
    policy = Policy.from_dict({"default": "off", "rules": [{"kind": "full", "scheme": "turbo"}]})
    report = kvstow.attach(build("gemma3"), policy)
    full = [layer for layer in report.layers if layer.quantised]
    assert full
    assert all(str(layer.scheme) == "turbo:k8v3" for layer in full)
    assert len(full) < len(report.layers)


def test_hard_keys_are_warned_of_for_the_layers_under_few_bits_alone(monkeypatch):
    from kvstow.integrations.mlx_lm import hardness  # noqa: PLC0415

    of_layers = {bits: {0: 0.1, 1: 9.0} for bits in (2, 4, 5)}
    monkeypatch.setattr(hardness, "of_model", lambda *_: of_layers)
    with pytest.warns(kvstow.KvstowWarning, match="1 of 1 layers"):
        kvstow.attach(build("llama"), TWO)
    safe = Policy.from_dict({"rules": [{"layers": 0, "scheme": "turbo:k4v8"}]})
    assert kvstow.attach(build("llama"), safe).warnings == ()

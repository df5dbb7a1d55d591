"""The one function of mlx-lm that is replaced: when it is, and that nobody else notices."""

import threading

import numpy as np
import pytest

import kvstow
from kvstow import Scheme

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
tiny = pytest.importorskip("tests.integration.tiny")
attached = pytest.importorskip("tests.integration.attach.attached")

pytestmark = pytest.mark.mlx
build = tiny.build
run, is_ours, affine_by_hand = attached.run, attached.is_ours, attached.affine_by_hand


def test_the_global_is_replaced_by_the_first_attach_and_restored_by_the_last_detach():
    one, two = build("llama"), build("qwen2")
    kvstow.attach(one, "turbo")
    assert is_ours()
    kvstow.attach(one, "turbo:k8v8")
    kvstow.attach(two, "turbo")
    kvstow.detach(one)
    assert is_ours()
    kvstow.detach(one)
    assert is_ours()
    kvstow.detach(two)
    assert not is_ours()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"scheme": "turbo", "fetch": "eager"}),
        ("llama", {"scheme": "affine:8"}),
        ("llama", {"scheme": "off"}),
        ("stablelm", {"scheme": "turbo"}),
    ],
)
def test_the_global_stays_where_nothing_is_deferred(name, options):
    model = build(name)
    kvstow.attach(model, **options)
    assert not is_ours()
    kvstow.detach(model)
    assert not is_ours()


@pytest.mark.parametrize("after", ["turbo:k8v3 eager", "affine:8 auto", "off auto"])
def test_leaving_deferred_for_another_path_restores_the_global(after):
    model = build("llama")
    kvstow.attach(model, "turbo")
    scheme, fetch = after.split()
    kvstow.attach(model, scheme, fetch=fetch)
    assert not is_ours()


def test_two_models_under_two_schemes_run_in_turns():
    one, two = build("llama"), build("qwen3", seed=1)
    with kvstow.attached(one, "turbo:k8v8"):
        alone_one = run(one)
    with kvstow.attached(two, "turbo:k4v2"):
        alone_two = run(two)
    kvstow.attach(one, "turbo:k8v8")
    kvstow.attach(two, "turbo:k4v2")
    assert (run(two) == alone_two).all()
    assert (run(one) == alone_one).all()
    kvstow.detach(two)
    assert (run(one) == alone_one).all()


def test_affine_passes_through_while_another_model_is_deferred():
    model, other = build("llama"), build("qwen2")
    wanted = run(model, affine_by_hand(model, Scheme.parse("affine:8")))
    kvstow.attach(other, "turbo")
    assert is_ours()
    assert (run(model, affine_by_hand(model, Scheme.parse("affine:8"))) == wanted).all()
    kvstow.attach(model, "affine:8")
    assert (run(model) == wanted).all()


def test_one_model_can_mix_affine_and_packed_layers():
    model = build("llama")
    kvstow.attach(model, "turbo:k8v8")
    cache = host.make_prompt_cache(model)
    cache[0] = host.QuantizedKVCache(64, 8)
    mixed = run(model, cache)
    kvstow.detach(model)
    # Both are 8 bits: logits of order 1 move by a few hundredths.
    np.testing.assert_allclose(mixed, run(model), rtol=0, atol=0.2)


def test_attaching_while_another_thread_decodes_takes_the_deferred_path():
    busy, stop = build("llama"), threading.Event()
    mx.eval(busy.parameters())  # a graph belongs to the thread that built it
    kvstow.attach(busy, "turbo")

    def decode():
        while not stop.is_set():
            run(busy)

    thread = threading.Thread(target=decode)
    thread.start()
    model = build("llama")
    paths = {kvstow.attach(model, "turbo").fetch for _ in range(20)}
    stop.set()
    thread.join()
    kvstow.detach(model)
    kvstow.detach(busy)
    assert paths == {"deferred"}

"""Logits of an attached model are those of the definition, whatever the schedule."""

import numpy as np
import pytest

import kvstow
from kvstow import Scheme

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
tiny = pytest.importorskip("tests.integration.tiny")
attached = pytest.importorskip("tests.integration.attach.attached")

pytestmark = pytest.mark.mlx
attachment = integration.attachment
build, tokens = tiny.build, tiny.tokens
EXPECTED, SCHEDULE = attached.EXPECTED, attached.SCHEDULE
run, schedule_of, defined = attached.run, attached.schedule_of, attached.defined
affine_by_hand = attached.affine_by_hand


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k4v2+start15+stored"])
def test_logits_are_those_of_the_definition_over_a_whole_schedule(name, scheme):
    model, schedule = build(name), schedule_of(name)
    off = run(model, schedule=schedule)
    report = kvstow.attach(model, scheme, fetch="eager")
    eager = run(model, schedule=schedule)
    automatic = kvstow.attach(model, scheme)
    auto = run(model, schedule=schedule)
    kvstow.detach(model)
    wanted = run(model, defined(model, report), schedule)
    assert (eager == wanted).all()
    # An element between two codes may take the other one, as the order of sums differs.
    tolerance = 1e-2 if automatic.fetch == "deferred" else 0
    np.testing.assert_allclose(auto, wanted, rtol=0, atol=tolerance)
    assert np.abs(off - wanted).max() > 0.1 * off.std()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text"])
def test_the_first_append_is_exact_and_the_second_is_not(name):
    model = build(name)
    off = run(model)
    kvstow.attach(model, "turbo")
    on = run(model)
    np.testing.assert_allclose(on[:, :12], off[:, :12], rtol=0, atol=1e-5)
    assert np.abs(on[:, 12:17] - off[:, 12:17]).max() > 1e-2


def test_a_layer_that_borrows_anothers_cache_attends_to_what_is_stored_from_the_first_append():
    model = build("gemma3n")
    off = run(model, schedule=(12,))
    kvstow.attach(model, "turbo:k8v3")
    assert np.abs(run(model, schedule=(12,)) - off).max() > 1e-3


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_start_leaves_every_logit_as_it_was_until_n_tokens_are_held(fetch):
    model = build("llama")
    off = run(model, schedule=(12, 5, 1, 1, 1))
    kvstow.attach(model, "turbo:k8v3+start18", fetch=fetch)
    on = run(model, schedule=(12, 5, 1, 1, 1))
    assert np.abs(on - off)[:, :18].max() < 1e-5
    assert np.abs(on - off)[:, 18:].max() > 1e-2


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_under_stored_logits_do_not_depend_on_how_the_prompt_was_cut(fetch):
    model = build("llama")
    schedules = [(30,), (12, 18), (1,) * 30, (29, 1)]
    kvstow.attach(model, "turbo:k8v3+stored", fetch=fetch)
    at_once, *cut = (run(model, schedule=s) for s in schedules)
    for logits in cut:
        np.testing.assert_allclose(logits, at_once, rtol=0, atol=1e-3)
    kvstow.attach(model, "turbo:k8v3", fetch=fetch)
    at_once, *cut = (run(model, schedule=s) for s in schedules)
    assert min(np.abs(logits - at_once).max() for logits in cut[:2]) > 1e-2


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_rows_of_a_batch_equal_the_same_rows_alone(fetch):
    model = build("llama")
    kvstow.attach(model, "turbo", fetch=fetch)
    together, text, at = run(model, b=3), tokens(200, b=3), 0
    cache = host.make_prompt_cache(model)
    alone = []
    for n in SCHEDULE:
        if n < 0:
            host.trim_prompt_cache(cache, -n)
        else:
            alone.append(np.array(model(text[1:2, at : at + n], cache=cache)))
        at += n
    np.testing.assert_allclose(together[1:2], np.concatenate(alone, axis=1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_a_half_precision_model_stays_in_half_precision(fetch, dtype):
    model = build("llama", dtype=getattr(mx, dtype))
    off = run(model, schedule=(9, 4, 1))
    kvstow.attach(model, "turbo:k8v8", fetch=fetch)
    cache = host.make_prompt_cache(model)
    on = run(model, cache, schedule=(9, 4, 1))
    assert model(tokens(1), cache=cache).dtype == getattr(mx, dtype)
    # 8 bits, and bfloat16's own noise of 2**-8 on logits of order 1.
    np.testing.assert_allclose(on, off, rtol=0, atol=0.2)


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_a_prompt_cache_that_was_trimmed_back_continues_as_it_did(fetch):
    model = build("llama")
    kvstow.attach(model, "turbo", fetch=fetch)
    cache, text = host.make_prompt_cache(model), tokens(60)
    model(text[:, :30], cache=cache)
    first = np.array(model(text[:, 30:40], cache=cache))
    host.trim_prompt_cache(cache, 10)
    again = np.array(model(text[:, 30:40], cache=cache))
    assert (first == again).all()


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "turbo:k8v3+start50", "affine:8"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_converted_cache_continues_like_one_filled_at_once(name, scheme):
    model, text = build(name), tokens(40)
    plain = host.make_prompt_cache(model)
    for at in (0, 10):
        model(text[:, at : at + 10], cache=plain)
    kvstow.attach(model, scheme)
    at_once = host.make_prompt_cache(model)
    model(text[:, :20], cache=at_once)
    converted = attachment(model).convert(plain)
    assert [type(c) for c in converted] == [type(c) for c in at_once]
    got, wanted = (np.array(model(text[:, 20:25], cache=c)) for c in (converted, at_once))
    # affine's first append is quantised already, so its tokens were made otherwise.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.1 if scheme == "affine:8" else 1e-3)


@pytest.mark.parametrize("text", ["affine:8", "affine:4", "affine:8g32"])
def test_affine_is_mlx_lms_own_quantised_cache_from_the_first_token(text):
    model, scheme = build("llama"), Scheme.parse(text)
    off, wanted = run(model), run(model, affine_by_hand(model, scheme))
    report = kvstow.attach(model, text)
    assert (report.fetch, report.n_quantised) == ("host", 2)
    assert (run(model) == wanted).all()
    assert np.abs(wanted - off).max() > 1e-3

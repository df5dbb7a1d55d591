"""Models with sliding windows of 32 tokens, several laps long: quantised in every layer."""

from functools import cache

import numpy as np
import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
tiny = pytest.importorskip("tests.integration.tiny")
batching = pytest.importorskip("tests.integration.batching")

pytestmark = pytest.mark.mlx
NAMES = ["gemma3_text", "gemma3n", "gpt_oss", "llama-sliding", "cohere2"]
# A prompt in chunks, one longer than the window; single tokens over two laps; more chunks.
SCHEDULE = (20, 50, 5, *(1,) * 70, 40, 3, *(1,) * 12)
FULL = kvstow.Policy.from_dict({"rules": [{"kind": "sliding", "scheme": "off"}]})


def run(model, cache):
    text, at, logits = tiny.tokens(sum(SCHEDULE)), 0, []
    for n in SCHEDULE:
        logits.append(np.array(model(text[:, at : at + n], cache=cache).astype(mx.float32)))
        at += n
    return np.concatenate(logits, axis=1)


@cache
def logits(name, scheme="off", fetch="auto"):
    """Of the whole schedule, under a scheme for all layers; several tests look at the same."""
    model = tiny.build(name)
    with kvstow.attached(model, scheme, fetch=fetch) as report:
        assert scheme == "off" or report.n_quantised == len(report.layers)
        return run(model, host.make_prompt_cache(model))


def rms(x):
    return float(np.sqrt(np.square(x).mean()))


@pytest.mark.xdist_group("laps")
@pytest.mark.parametrize("fetch", ["eager", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_under_k8v8_logits_stay_close_lap_after_lap(name, fetch):
    exact, stored = logits(name), logits(name, "turbo:k8v8", fetch)
    # The median, since a token of gpt_oss may go to another expert.
    apart = np.sqrt(np.square(stored - exact).mean(axis=-1))[0] / exact.std()
    assert 0 < np.median(apart) < 0.04
    assert np.median(apart[-20:]) < 0.05  # errors do not pile up


@pytest.mark.xdist_group("laps")
@pytest.mark.parametrize("name", NAMES)
def test_fewer_bits_are_further_away(name):
    schemes = ("turbo:k8v8", "turbo:k8v3", "turbo:k2v2")
    apart = [rms(logits(name, scheme, "auto") - logits(name)) for scheme in schemes]
    assert apart == sorted(apart)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_bytes_shrink_and_stay_those_of_the_window(name):
    model = tiny.build(name)
    plain = host.make_prompt_cache(model)
    run(model, plain)
    with kvstow.attached(model, "turbo:k8v3"):
        packed = host.make_prompt_cache(model)
        run(model, packed)
    for before, after in zip(plain, packed, strict=True):
        assert before.nbytes / after.nbytes == 2 * 2.56  # float32
    sliding = packed[0]
    assert (sliding.capacity, sliding.offset) == (32, sum(SCHEDULE))
    assert kvstow.usage(packed).compression_ratio == pytest.approx(2.56)


def test_the_sliding_layers_can_be_left_as_they_are():
    model = tiny.build("gemma3_text")
    with kvstow.attached(model, FULL) as report:
        assert report.kept == {"the policy says off": [0]}
        assert [layer.kind for layer in report.layers] == ["sliding", "full"]
        assert type(host.make_prompt_cache(model)[0]) is host.RotatingKVCache
    with kvstow.attached(model, "turbo:k8v3") as report:
        assert "sliding windows 1 (0)" in str(report)


@pytest.mark.parametrize("scheme", ["turbo:k8v8", "turbo:k8v3+start40", "turbo:k8v8+stored"])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama-sliding"])
def test_a_reply_of_a_batch_is_the_reply_alone_beyond_the_window(name, scheme):
    model = tiny.build(name)
    requests, n_tokens = batching.prompts((50, 7, 33, 90)), (45, 60, 3, 20)
    options = {"prefill_batch_size": 2, "completion_batch_size": 3}
    with kvstow.attached(model, scheme):
        replies = batching.together(model, requests, n_tokens, **options)
        for request, n, got in zip(requests, n_tokens, replies, strict=True):
            batching.assert_same_reply(got, batching.alone(model, request, n), batching.LOGITS)
            assert got.cache[0].capacity <= 32
            assert kvstow.usage(got.cache).tokens == len(request) + n


def test_layers_that_stay_plain_share_their_masks_with_packed_ones_in_a_batch():
    """Every layer's rows lie where mlx-lm's own lie, so one mask fits all."""
    model = tiny.build("llama", num_hidden_layers=4)
    policy = kvstow.Policy.from_dict(
        {"default": "turbo:k8v8", "rules": [{"layers": "0, 2", "scheme": "off"}]}
    )
    requests, n_tokens = batching.prompts((20, 3, 11)), (9, 12, 5)
    with kvstow.attached(model, policy):
        replies = batching.together(model, requests, n_tokens)
        for request, n, got in zip(requests, n_tokens, replies, strict=True):
            batching.assert_same_reply(got, batching.alone(model, request, n), batching.LOGITS)

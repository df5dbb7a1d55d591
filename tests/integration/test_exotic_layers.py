"""Layers that are not one plain cache beside mlx-lm's own attention, each in a tiny model of it."""

import copy

import numpy as np
import pytest

import kvstow
from kvstow import UnsupportedModel

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
generation = pytest.importorskip("mlx_lm.generate")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
members = pytest.importorskip("kvstow.integrations.mlx_lm.members")
speculative = pytest.importorskip("kvstow.integrations.mlx_lm.speculative")
tiny = pytest.importorskip("tests.integration.tiny")
build = pytest.importorskip("tests.integration.architectures").build

pytestmark = pytest.mark.mlx
LONG = (12, 5, 1, 1, 40, 1, 1, 9)  # beyond windows and chunks of 32, blocks of 4
RECURRENT = "recurrent layer has a state, not keys and values"
CHUNKED = "chunked attention of 32 tokens keeps its cache"
SEVERAL = "several plain caches in one layer, and nothing says which attention reads"
# Name: path, quantised layers, reasons of the others.
EXPECTED = {
    # Later layers ask the cache of an earlier one for keys and values, which are decoded then.
    "afm7": ("deferred", [0, 1], {}),
    "gemma3n": ("deferred", [0, 1, 2, 3], {}),
    # Later layers get what an earlier one's cache returned, and no cache.
    "gemma4": ("deferred", [0, 1, 2, 3, 4], {}),
    "iquestloopcoder": ("deferred", [0, 1, 2, 3], {}),
    # Attention of their own, with a cap on the logits.
    "gemma2": ("eager", [0, 1], {}),
    # Norms where others have none, and mlx-lm's own attention.
    "olmo2": ("deferred", [0, 1], {}),
    # Recurrent or convolutional layers between those with attention.
    "lfm2": ("deferred", [1], {RECURRENT: [0]}),
    "nemotron_h": ("deferred", [1], {RECURRENT: [0]}),
    "qwen3_next": ("deferred", [3], {RECURRENT: [0, 1, 2]}),
    # Both in one layer.
    "baichuan_m1": ("deferred", [0, 1], {}),
    "falcon_h1": ("deferred", [0, 1], {}),
    # A second cache, of keys that choose blocks.
    "minimax_m3_vl": ("deferred", [0], {SEVERAL: [1]}),
    "llama4": ("deferred", [3], {CHUNKED: [0, 1, 2]}),
    # Attention sinks.
    "gpt_oss": ("deferred", [0, 1], {}),
    "mimo_v2_flash": ("deferred", [0, 1], {}),
}


def rms(x):
    return float(np.sqrt(np.square(x).mean()))


def run(model, cache=None, schedule=LONG):
    cache = host.make_prompt_cache(model) if cache is None else cache
    text, at, logits = tiny.tokens(200), 0, []
    for n in schedule:
        logits.append(np.array(model(text[:, at : at + n], cache=cache).astype(mx.float32)))
        at += n
    return np.concatenate(logits, axis=1)


def defined_layer(cache, scheme):
    return members.with_plain(cache, tiny.definition(scheme, members.plain(cache)))


def defined(model, report):
    """A prompt cache whose quantised layers follow the definition in numpy."""
    return [
        defined_layer(cache, report.scheme) if layer.quantised else cache
        for layer, cache in zip(report.layers, host.make_prompt_cache(model), strict=True)
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_says_of_each_layer_what_it_is_and_why(name):
    path, quantised, kept = EXPECTED[name]
    with kvstow.attached(build(name), "turbo:k8v3") as report:
        assert [layer.index for layer in report.layers if layer.quantised] == quantised
        assert (report.fetch, report.kept) == (path, kept)
        assert {x.fetch for x in report.layers} == {path} | ({"host"} if kept else set())


@pytest.mark.parametrize("name", EXPECTED)
def test_beyond_every_window_logits_are_those_of_the_definition(name):
    model = build(name)
    with kvstow.attached(model, "turbo:k8v3", fetch="eager") as report:
        eager = run(model)
    with kvstow.attached(model, "turbo:k8v3"):
        automatic = run(model)
    wanted, off = run(model, defined(model, report)), run(model)
    np.testing.assert_array_equal(eager, wanted)
    # An element between two codes may take the other one, as the order of sums differs.
    assert rms(automatic - wanted) < 1e-2 * off.std()
    assert rms(wanted - off) > 1e-3 * off.std()


@pytest.mark.parametrize("name", EXPECTED)
def test_greedy_text_under_k8v8_parts_from_the_exact_text_only_at_near_ties(name):
    model = build(name)

    def greedy(cache):
        logits = np.array(model(tiny.tokens(20), cache=cache).astype(mx.float32))[0, -1:]
        chosen = []
        for _ in range(12):
            chosen.append((int(logits[-1].argmax()), float(np.ptp(np.sort(logits[-1])[-2:]))))
            token = mx.array([[chosen[-1][0]]])
            logits = np.array(model(token, cache=cache).astype(mx.float32))[0, -1:]
        return chosen, logits.std()

    exact, deviation = greedy(host.make_prompt_cache(model))
    with kvstow.attached(model, "turbo:k8v8"):
        stored, _ = greedy(host.make_prompt_cache(model))
    parted = [gap for (a, gap), (b, _) in zip(exact, stored, strict=True) if a != b]
    assert not parted or parted[0] < 0.1 * deviation


# --- a CacheList


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "affine:8"])
def test_in_a_cache_list_only_the_keys_and_values_are_replaced(scheme):
    model = build("falcon_h1")
    with kvstow.attached(model, scheme):
        first, second = host.make_prompt_cache(model)
        assert type(first) is type(second) is host.CacheList
        recurrent, ours = first.caches
        assert type(recurrent) is host.ArraysCache
        assert isinstance(ours, integration.PackedKVCache | host.QuantizedKVCache)
        run(model, [first, second])
        assert [c.offset for c in (first[1], second[1])] == [sum(LONG)] * 2


def test_the_bytes_of_a_cache_list_shrink_and_are_counted():
    model = build("falcon_h1")
    plain = host.make_prompt_cache(model)
    run(model, plain)
    with kvstow.attached(model, "turbo:k8v3"):
        packed = host.make_prompt_cache(model)
        run(model, packed)
    before, after = kvstow.usage(plain), kvstow.usage(packed)
    keys_and_values = sum(c[1].nbytes for c in plain)
    saved = keys_and_values * (1 - 1 / 5.12)  # 6.25 bits in the place of float32
    assert before.kv_bytes - after.kv_bytes == pytest.approx(saved)
    assert after.kv_bytes_bf16 == before.kv_bytes_bf16


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "affine:8"])
def test_a_filled_cache_list_is_converted_and_copied(scheme):
    model, text = build("falcon_h1"), tiny.tokens(40)
    plain = host.make_prompt_cache(model)
    model(text[:, :20], cache=plain)
    with kvstow.attached(model, scheme):
        at_once = host.make_prompt_cache(model)
        model(text[:, :20], cache=at_once)
        converted = integration.convert(model, copy.deepcopy(plain))
        copied = copy.deepcopy(at_once)
        got, twin, wanted = (
            np.array(model(text[:, 20:25], cache=c)) for c in (converted, copied, at_once)
        )
    assert (twin == wanted).all()
    # affine's first append is quantised already, so its tokens were made otherwise.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.1 if scheme == "affine:8" else 1e-3)


def test_a_cache_list_with_a_recurrent_part_cannot_take_tokens_back():
    assert "ArraysCache cannot forget" in speculative.why_untrimmable(build("falcon_h1"))


@pytest.mark.parametrize("name", ["falcon_h1", "minimax_m3_vl"])
def test_the_shape_says_what_is_quantised(name):
    shape = integration.read_shape(build(name))
    n_full = sum(layer.kind == "full" for layer in shape.layers)
    assert n_full == len(EXPECTED[name][1])


# --- latent attention


@pytest.mark.parametrize(
    "name", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear", "longcat_flash"]
)
@pytest.mark.parametrize("scheme", ["turbo:k8v3", "affine:8"])
def test_latent_attention_is_refused_with_the_reason_wherever_its_cache_is(name, scheme):
    model = build(name)
    with pytest.raises(UnsupportedModel, match=r"multi-head latent attention \(kv_lora_rank 64\)"):
        kvstow.attach(model, scheme)
    assert "make_cache" not in vars(model)


# --- a batch


@pytest.mark.parametrize(
    "name", ["afm7", "falcon_h1", "gemma3n", "gemma4", "gpt_oss", "lfm2", "qwen3_next"]
)
def test_rows_of_a_batch_have_the_tokens_of_the_same_rows_alone(name):
    model, prompts = build(name), [tiny.tokens(n, seed=n)[0].tolist() for n in (9, 20, 14)]
    with kvstow.attached(model, "turbo:k8v8+stored"):
        alone = [
            [int(t) for t, _ in generation.generate_step(mx.array(p), model, max_tokens=6)]
            for p in prompts
        ]
        batch = generation.BatchGenerator(model)
        rows = batch.insert(prompts, max_tokens=[6] * 3)
        together = {row: [] for row in rows}
        while min(map(len, together.values())) < 6:
            _, responses = batch.next()
            for response in responses:
                together[response.uid].append(response.token)
    assert [together[row] for row in rows] == alone

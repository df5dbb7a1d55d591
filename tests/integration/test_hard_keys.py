"""Keys that few bits garble: measured on the model, and warned of by `attach`."""

import gc
import subprocess
import sys
import warnings

import numpy as np
import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
tiny = pytest.importorskip("tests.integration.tiny")
hardness = pytest.importorskip("kvstow.integrations.mlx_lm.hardness")
attach = pytest.importorskip("kvstow.integrations.mlx_lm.attach")
models = pytest.importorskip("kvstow.models")

pytestmark = pytest.mark.mlx


def hard(**more):
    """A model with large constants in the keys of its second layer, as Qwen2.5 has."""
    model = tiny.build("qwen2", **more)
    bias = model.layers[1].self_attn.k_proj.bias
    slow = bias.size // 4 - 1  # of the first head: positions hardly rotate it
    model.layers[1].self_attn.k_proj.bias = bias.at[slow :: slow + 1].add(60.0)
    return model


@pytest.fixture(scope="module")
def easy():
    return tiny.build("llama")


# --- the measure


def test_hardness_is_the_definition(rng):
    keys = rng.normal(size=(2, 3, 20, 64)).astype(np.float32)
    keys[:, 1, :, 5] += 30
    codec = pytest.importorskip("kvstow.codec.reference")
    error = codec.decode_keys(codec.encode_keys(keys, bits=4), bits=4) - keys
    expected = np.sqrt((error**2).mean() / ((keys - keys.mean(axis=2, keepdims=True)) ** 2).mean())
    assert hardness.hardness(mx.array(keys)) == pytest.approx(expected, rel=1e-5)


def test_a_constant_in_one_channel_makes_keys_hard(rng):
    keys = rng.normal(size=(1, 2, 40, 64)).astype(np.float32)
    before = hardness.hardness(mx.array(keys))
    keys[..., 3] += 100
    assert before < 0.1
    keys[..., 40] -= 100
    assert hardness.hardness(mx.array(keys)) > 0.9  # 1: all other channels are lost


@pytest.mark.parametrize("factor", [1e-2, 16.0, 1e3])
def test_hardness_has_no_unit(rng, factor):
    keys = rng.normal(size=(1, 2, 40, 64)).astype(np.float32)
    scaled = hardness.hardness(mx.array(keys * factor))
    assert scaled == pytest.approx(hardness.hardness(mx.array(keys)), rel=1e-2)


def test_more_bits_are_less_hard(rng):
    keys = mx.array(rng.normal(size=(1, 2, 40, 64)).astype(np.float32))
    figures = [hardness.hardness(keys, bits) for bits in (8, 5, 4, 2)]
    assert figures == sorted(figures)


def test_keys_that_are_all_alike_say_nothing():
    assert hardness.hardness(mx.ones((1, 2, 5, 64))) == 0


# --- attach


@pytest.mark.parametrize("scheme", ["turbo:k4v3", "turbo:k2v2", "affine:4"])
def test_a_scheme_that_hard_keys_do_not_survive_is_warned_of(scheme):
    model = hard()
    with pytest.warns(kvstow.KvstowWarning, match="its keys are hard to store") as caught:
        report = kvstow.attach(model, scheme)
    assert [str(w.message) for w in caught] == list(report.warnings)
    assert [w.filename for w in caught] == [__file__]
    assert scheme in report.warnings[0]


def test_a_with_block_warns_at_its_own_line():
    model = hard()
    with (
        pytest.warns(kvstow.KvstowWarning) as caught,
        kvstow.attached(model, "turbo:k4v3") as report,
    ):
        assert report.warnings
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize(
    ("scheme", "better"),
    [
        ("turbo:k4v3", "turbo:k8v3 keeps them, for 2 bits more per value"),
        ("turbo:k2v4+search", "turbo:k8v4+search keeps them, for 3 bits more per value"),
        ("affine:4", "turbo:k8v3 keeps them, for 1.75 bits more per value"),
    ],
)
def test_the_warning_names_a_scheme_that_keeps_the_keys_and_its_price(scheme, better):
    model = hard()
    with pytest.warns(kvstow.KvstowWarning) as caught:
        kvstow.attach(model, scheme)
    assert better in str(caught[0].message)
    assert "in cache 1 " in str(caught[0].message)
    named = better.partition(" ")[0]
    assert kvstow.attach(model, named).warnings == ()


def test_where_turbo_cannot_store_the_keys_the_warning_names_affine():
    model = hard(hidden_size=384)  # head_dim 96
    with pytest.warns(kvstow.KvstowWarning, match=r"affine:8g32 keeps them, for 4 bits"):
        kvstow.attach(model, "affine:4g32")


@pytest.mark.parametrize("scheme", ["turbo:k4v3", "turbo:k5v4", "affine:4"])
def test_easy_keys_are_not_warned_of(easy, scheme):
    with kvstow.attached(easy, scheme) as report:  # a warning is an error here
        assert report.warnings == ()


@pytest.mark.parametrize("scheme", ["off", "turbo:k8v2", "affine:8"])
def test_eight_bits_for_keys_cost_no_measurement(monkeypatch, scheme):
    monkeypatch.setattr(hardness, "_measure", lambda *_: pytest.fail("the model was run"))
    kvstow.attach(hard(), scheme)


def test_a_model_without_weights_is_not_measured(monkeypatch):
    monkeypatch.setattr(hardness, "_measure", lambda *_: pytest.fail("the model was run"))
    bare = models.skeleton({"model_type": "qwen2"} | tiny.COMMON)
    assert kvstow.attach(bare, "turbo:k4v3").warnings == ()


def test_a_model_is_measured_once(monkeypatch):
    calls = []
    measure = hardness._measure
    monkeypatch.setattr(hardness, "_measure", lambda *a: calls.append(a) or measure(*a))
    model = hard()
    with warnings.catch_warnings(action="ignore", category=kvstow.KvstowWarning):
        for scheme in ("turbo:k4v3", "turbo:k2v2", "turbo:k8v3", "affine:4", "turbo:k4v3"):
            kvstow.attach(model, scheme)
    assert len(calls) == 1


def test_a_measurement_does_not_outlive_its_model():
    model = hard()
    with pytest.warns(kvstow.KvstowWarning):
        kvstow.attach(model, "turbo:k4v3")
    key = id(model)
    assert key in hardness._known
    del model
    gc.collect()
    assert key not in hardness._known


def test_a_filter_turns_the_warning_off():
    with warnings.catch_warnings(action="ignore", category=kvstow.KvstowWarning):
        report = kvstow.attach(hard(), "turbo:k4v3")
    assert report.n_quantised == 2


def test_a_warning_that_a_filter_makes_an_error_leaves_the_model_as_it_was():
    model = hard()
    kvstow.attach(model, "turbo:k8v4")
    with pytest.raises(kvstow.KvstowWarning):
        kvstow.attach(model, "turbo:k4v3")
    assert {str(c.scheme) for c in host.make_prompt_cache(model)} == {"turbo:k8v4"}


def test_layers_that_keep_their_own_cache_do_not_count():
    model = tiny.build("qwen3_next")  # its first three layers are recurrent
    figures = hardness.of_model(model, lambda: attach.plain_caches(model))
    assert {bits: list(x) for bits, x in figures.items()} == {2: [3], 4: [3], 5: [3]}


def test_sliding_layers_count():
    model = tiny.build("gemma3_text")
    figures = hardness.of_model(model, lambda: attach.plain_caches(model))
    assert {bits: list(x) for bits, x in figures.items()} == {2: [0, 1], 4: [0, 1], 5: [0, 1]}


# --- the demo model


@pytest.mark.model
def test_the_demo_model_has_easy_keys(smollm2):
    model, _ = smollm2
    for scheme in ("turbo:k4v3", "affine:4"):
        with kvstow.attached(model, scheme) as report:
            assert report.warnings == ()


@pytest.mark.model
def test_random_tokens_are_as_hard_as_text(smollm2):
    model, tokenizer = smollm2
    texts = pytest.importorskip("kvstow.evaluate.texts")
    tokens = texts.passages(tokenizer, texts.bundled(), 64, n=2).tokens
    cache = host.make_prompt_cache(model)
    model(mx.array(tokens), cache=cache)
    on_text = max(hardness.hardness(c.keys_and_values()[0]) for c in cache)
    at_attach = max(hardness.of_model(model, lambda: attach.plain_caches(model))[4].values())
    assert at_attach == pytest.approx(on_text, rel=0.2)
    assert on_text < hardness.LIMIT / 1.5


# --- the program


def run_main(code):
    """What a command prints, in a process where warnings are not errors."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_program_prints_a_warning_as_one_line_and_once():
    done = run_main(
        "import warnings, kvstow\n"
        "from kvstow.cli.warn import warnings_as_lines\n"
        "with warnings_as_lines():\n"
        "    for _ in range(2): warnings.warn('keys are hard', kvstow.KvstowWarning)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning: keys are hard\n")

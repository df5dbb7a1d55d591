"""Each of mlx-lm's architectures under a scheme: quantised where it can be, and never wrong."""

import gc
import runpy
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvstow
from kvstow import UnsupportedModel

mx = pytest.importorskip("mlx.core")
host = pytest.importorskip("mlx_lm.models.cache")
integration = pytest.importorskip("kvstow.integrations.mlx_lm")
members = pytest.importorskip("kvstow.integrations.mlx_lm.members")
tiny = pytest.importorskip("tests.integration.tiny")
architectures = pytest.importorskip("tests.integration.architectures")

pytestmark = pytest.mark.mlx
ROOT = Path(kvstow.__file__).parents[2]
SCHEME = "turbo:k8v8"
SCHEDULE = (12, 5, 1, 1, 1)
MODELS = [name for name in architectures.names() if name not in architectures.NOT_TINY]
# One for each way in which a cache is used: borrowed by later layers (as a cache, as arrays, by
# its keys_and_values), own attention, recurrent and convolutional layers beside or within one,
# two plain caches, chunks, sinks, a second loop over the layers.
SAMPLE = {
    *("afm7", "baichuan_m1", "falcon_h1", "gemma2", "gemma3n", "gemma4", "gpt_oss"),
    *("iquestloopcoder", "lfm2", "llama", "llama4", "mimo_v2_flash", "minimax_m3_vl"),
    *("nanbeige", "nemotron_h", "olmo2", "phi", "plamo2", "qwen3_next"),
}
# How far 8 bits may move logits, in units of their own deviation (root mean square). Wrong
# attention moves them by about 1; afm7 rounds keys and values itself, and amplifies. gemma4
# does not scale the products of queries and keys down.
CLOSE, CLOSE_OF = 0.02, {"afm7": 0.05, "gemma4": 0.06, "gemma4_text": 0.06}


@pytest.fixture(scope="module")
def page():
    """What the tool says now, and what the documentation does."""
    tool = runpy.run_path(str(ROOT / "tools" / "make_architectures_docs.py"))
    stored = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    return SimpleNamespace(made=tool["page"](), stored=stored)


def test_the_page_of_architectures_is_what_attach_does(page):
    if f"mlx-lm {metadata.version('mlx-lm')}," not in page.stored:
        pytest.skip("the page is about another version of mlx-lm")
    assert page.stored == page.made, "run tools/make_architectures_docs.py"


@pytest.mark.parametrize("name", architectures.names())
def test_every_architecture_of_mlx_lm_is_on_the_page(page, name):
    assert page.stored.count(f"\n| {name} |") == 1


def logits_of(model, cache=None):
    cache = host.make_prompt_cache(model) if cache is None else cache
    text, at, logits = tiny.tokens(sum(SCHEDULE)), 0, []
    for n in SCHEDULE:
        out = model(text[:, at : at + n], cache=cache)[..., : tiny.VOCAB]
        logits.append(np.array(out.astype(mx.float32)))
        at += n
    return np.concatenate(logits, axis=1)


def rms(x):
    return np.sqrt(np.square(x).mean())


def defined_layer(cache, scheme):
    return members.with_plain(cache, tiny.definition(scheme, members.plain(cache)))


def defined(model, report):
    """A prompt cache whose quantised layers follow the definition in numpy."""
    return [
        defined_layer(cache, report.scheme) if layer.quantised else cache
        for layer, cache in zip(report.layers, host.make_prompt_cache(model), strict=True)
    ]


def is_ours(cache):
    parts = cache.caches if isinstance(cache, host.CacheList) else (cache,)
    ours = integration.PackedKVCache | integration.PackedRotatingKVCache
    return any(isinstance(part, ours) for part in parts)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.architectures)
        for name in MODELS
    ],
)
def test_no_architecture_is_silently_wrong(name):
    model = architectures.build(name)
    off = logits_of(model)
    try:
        with kvstow.attached(model, SCHEME) as report:
            caches = host.make_prompt_cache(model)
            automatic = logits_of(model)
            with kvstow.attached(model, SCHEME, fetch="eager"):
                eager = logits_of(model)
    except UnsupportedModel:
        return  # before anything was computed; the page has the reason
    assert [is_ours(cache) for cache in caches] == [layer.quantised for layer in report.layers]
    np.testing.assert_array_equal(eager, logits_of(model, defined(model, report)))
    deviation = off.std()
    assert rms(automatic - eager) < 1e-3 * deviation  # a number between two codes may flip
    assert rms(automatic - off) < CLOSE_OF.get(name, CLOSE) * deviation
    assert np.abs(automatic - off)[:, 12:].max(axis=-1).min() > 0  # it is read back from codes
    gc.collect()


def test_the_sample_is_of_models_that_are_quantised():
    assert set(MODELS) >= SAMPLE

"""The model of a server, as it is loaded."""

import json

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm")

from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import kvstow
from kvstow.errors import ModelFileError
from kvstow.integrations.mlx_lm import DeferredKVCache
from kvstow.serve.options import EngineOptions, ModelOptions
from kvstow.serve.provider import Provider

pytestmark = pytest.mark.mlx
LORA = {"rank": 2, "scale": 10.0, "dropout": 0.0}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a tiny model with some options."""
    monkeypatch.setenv("KVSTOW_CACHE", str(tmp_path / "cache"))
    path = pytest.importorskip("tests.models.conftest").gguf_writer(tmp_path)()
    provided = []

    def run(scheme="turbo:k8v3", **options):
        stored = kvstow.Scheme.parse(scheme)
        provider = Provider(ModelOptions(str(path), stored, "tiny", **options), EngineOptions())
        provided.append(provider)
        provider.load_default()
        return provider

    run.path = str(path)
    yield run
    for provider in provided:
        for model in (provider.model, provider.draft_model):
            if model is not None:
                kvstow.detach(model)


@pytest.fixture
def adapter(load, tmp_path):
    """A directory with a random adapter of the tiny model."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    model, _ = kvstow.load(load.path)
    linear_to_lora_layers(model, 1, LORA)
    found = tree_flatten(model.trainable_parameters())
    weights = {k: mx.random.normal(v.shape) for k, v in found if "lora" in k}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": LORA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def logits(provider):
    return provider.model(mx.array([[5, 6, 7]]), cache=make_prompt_cache(provider.model))


def test_the_caches_of_the_model_are_packed_and_batched(load):
    provider = load()
    assert {type(c) for c in make_prompt_cache(provider.model)} == {DeferredKVCache}
    assert (provider.is_batchable, provider.report.n_quantised) == (True, 2)
    assert provider.load("other", "names", None) == (provider.model, provider.tokenizer)


def test_what_mlx_lm_cannot_merge_is_not_batched(load):
    assert not load("affine:8").is_batchable


def test_an_adapter_changes_what_the_model_computes(load, adapter):
    plain, adapted = load(), load(adapter_path=str(adapter))
    assert adapted.report.n_quantised == 2
    assert not mx.allclose(logits(plain), logits(adapted))


def test_an_adapter_that_does_not_fit_is_refused(load, adapter):
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="mlx-lm cannot load the adapter"):
        load(adapter_path=str(adapter))


def test_a_draft_model_is_attached_too(load):
    provider = load(draft_model=load.path)
    caches = provider.fresh_caches()
    assert {type(c) for c in caches.draft} == {DeferredKVCache}
    assert not provider.is_batchable
    assert provider.draft_report.n_quantised == 2


def test_a_chat_template_that_is_none_is_refused_and_one_that_refuses_is_not(load):
    with pytest.raises(ModelFileError, match=r"is not Jinja: .*, in line 2"):
        load(chat_template="\n{% if")
    assert load(chat_template="{{ raise_exception('no') }}").tokenizer.has_chat_template


def test_a_chat_template_takes_the_place_of_the_models_own(load):
    tokenizer = load(chat_template="{{ messages[0].content }}!").tokenizer
    turns = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "abc!"

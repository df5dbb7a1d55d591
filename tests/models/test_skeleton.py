import copy
import resource
import sys
import time

import pytest

from kvstow import MissingDependency, ModelFileError, UnsupportedModel, attach, attached
from kvstow.models import skeleton

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
base = pytest.importorskip("mlx_lm.models.base")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")
make_prompt_cache = pytest.importorskip("mlx_lm.models.cache").make_prompt_cache
flatten = pytest.importorskip("mlx.utils").tree_flatten

LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
}
TINY = LLAMA_405B | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
GEMMA3 = {
    "model_type": "gemma3",
    "vocab_size": 50,
    "text_config": TINY | {"model_type": "gemma3_text", "head_dim": 64, "dtype": "float16"},
}


def without(key):
    return {k: v for k, v in TINY.items() if k != key}


def test_a_model_of_any_size_is_made_in_no_time_and_no_memory():
    mx.reset_peak_memory()
    before, begin = mx.get_active_memory(), time.perf_counter()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = skeleton(LLAMA_405B)
    cache = make_prompt_cache(model)
    logits = model(mx.zeros((1, 1), mx.int32), cache=cache)
    assert sum(x.size for _, x in flatten(model.parameters())) > 400e9
    assert (logits.shape[-1], cache[125].keys.shape) == (128256, (1, 8, 256, 128))
    assert mx.get_peak_memory() - before < 1e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 100e6 / 1024
    assert time.perf_counter() - begin < 5  # it takes 0.1 s


def test_attaching_a_skeleton_leaves_nothing_behind():
    deferred.remove(deferred.Owner())  # other tests' models may be gone without being detached
    before = base.quantized_scaled_dot_product_attention
    model = skeleton(TINY)
    with attached(model, "turbo:k8v3") as report:
        assert (report.n_quantised, report.fetch) == (2, "deferred")
    assert base.quantized_scaled_dot_product_attention is before
    assert "make_cache" not in vars(model)


def test_a_scheme_is_refused_on_a_skeleton_as_on_the_model():
    with pytest.raises(UnsupportedModel, match="the model has 80"):
        attach(skeleton(TINY | {"head_dim": 80}), "turbo:k8v3")


def test_the_config_that_was_given_stays_as_it_is():
    config = copy.deepcopy(GEMMA3)
    skeleton(config)
    assert config == GEMMA3


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (TINY, None, "bfloat16"),
        (TINY | {"torch_dtype": "float16"}, None, "float16"),
        (TINY | {"dtype": "float32", "torch_dtype": "float16"}, None, "float32"),
        (TINY | {"dtype": "float32"}, "float16", "float16"),
        (GEMMA3 | {"dtype": "bfloat16"}, None, "float16"),
        (
            TINY | {"dtype": "float16", "quantization": {"bits": 4, "group_size": 64}},
            None,
            "float16",
        ),
    ],
)
def test_the_dtype_is_the_language_models(config, dtype, expected):
    dtypes = {x.dtype for _, x in flatten(skeleton(config, dtype).parameters())}
    assert dtypes == {getattr(mx, expected)}


def test_parameters_that_mlx_lm_keeps_in_float32_stay_so(monkeypatch):
    llama = pytest.importorskip("mlx_lm.models.llama")
    monkeypatch.setattr(
        llama.Model, "cast_predicate", property(lambda _: lambda path: "norm" not in path), False
    )
    model = skeleton(TINY)
    assert model.model.norm.weight.dtype == mx.float32
    assert model.model.embed_tokens.weight.dtype == mx.bfloat16


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_key_that_is_missing_is_named(key):
    with pytest.raises(ModelFileError, match=f"the config of this llama lacks '{key}'"):
        skeleton(without(key))


def test_a_key_that_is_missing_inside_is_named():
    text = {"model_type": "llama"}
    with pytest.raises(ModelFileError, match="the config of this pixtral lacks 'hidden_size'"):
        skeleton({"model_type": "pixtral", "text_config": text})


@pytest.mark.parametrize("value", [None, "8", [8], {}, -1])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_value_that_makes_no_sense_is_an_error_of_ours(key, value):
    with pytest.raises(ModelFileError, match="mlx-lm makes no llama of this config: "):
        skeleton(TINY | {key: value})


@pytest.mark.parametrize("config", [without("model_type"), TINY | {"model_type": 3}])
def test_a_config_without_a_model_type_is_refused(config):
    with pytest.raises(ModelFileError, match="the config lacks 'model_type'"):
        skeleton(config)


# base and cache are modules beside the models; the module of olmo may end the program.
@pytest.mark.parametrize("model_type", ["rwkv99", "base", "cache", "..cache", "", "a b"])
def test_a_model_type_that_mlx_lm_lacks_is_refused_by_name(model_type):
    with pytest.raises(UnsupportedModel, match=f"does not run the model type '{model_type}'"):
        skeleton(TINY | {"model_type": model_type})


def test_a_module_of_mlx_lm_that_ends_the_program_is_only_a_refusal(monkeypatch):
    def leave(_):
        sys.exit(1)

    monkeypatch.setattr("mlx_lm.utils._get_classes", leave)
    with pytest.raises(UnsupportedModel, match="does not run the model type 'llama'"):
        skeleton(TINY)


def test_code_that_comes_with_a_model_is_not_run():
    with pytest.raises(UnsupportedModel, match=r"needs code of its own \('modeling.py'\)"):
        skeleton(TINY | {"model_file": "modeling.py"})


def test_a_model_that_reads_values_back_is_refused_before_it_computes_anything():
    with pytest.raises(UnsupportedModel, match="dbrx reads values back"):
        skeleton({"model_type": "dbrx"})


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ModelFileError, match="'dtype' in the config must be one of bfloat16"):
        skeleton(TINY | {"dtype": "int7"})


@pytest.mark.parametrize("absent", ["mlx.core", "mlx_lm.utils"])
def test_a_missing_framework_is_named_with_its_command(monkeypatch, absent):
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependency, match=r"pip install 'kvstow\[mlx\]'"):
        skeleton(TINY)

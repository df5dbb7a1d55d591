"""What `kvstow.models.skeleton` assumes of mlx-lm. A failure here is upstream news, not a bug."""

import re
from pathlib import Path

import pytest

from kvstow.models.skeleton import READ_VALUES

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
utils = pytest.importorskip("mlx_lm.utils")
models = pytest.importorskip("mlx_lm.models")
llama = pytest.importorskip("mlx_lm.models.llama")

CONFIG = {
    "model_type": "mistral",  # mlx-lm runs it as a llama
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
}
# These read values while weights are loaded or sharded, never in a forward pass.
READ_WHILE_LOADING = {"muse_spark", "prism_hadamard_qwen35"}
READS_A_VALUE = re.compile(r"\.tolist\(\)|\.item\(\)|np\.(?:as)?array\(|mx\.(?:async_)?eval\(")


def test_classes_are_found_by_the_model_type_of_a_config():
    assert utils._get_classes(CONFIG) == (llama.Model, llama.ModelArgs)


def test_a_model_type_that_is_not_there_is_a_value_error():
    with pytest.raises(ValueError, match="not supported"):
        utils._get_classes(CONFIG | {"model_type": "rwkv99"})


def test_args_skip_keys_that_they_do_not_know():
    assert llama.ModelArgs.from_dict(CONFIG | {"other": 1}).hidden_size == 64


def test_a_missing_key_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'hidden_size'"):
        llama.ModelArgs.from_dict({k: v for k, v in CONFIG.items() if k != "hidden_size"})


def test_making_and_calling_a_model_computes_nothing():
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG | {"vocab_size": 10**6}))
    assert model(mx.zeros((1, 1), mx.int32)).shape == (1, 1, 10**6)
    assert mx.get_peak_memory() - before < 10**5


def test_no_other_model_of_mlx_lm_reads_values_back():
    files = Path(models.__path__[0]).glob("*.py")
    found = {f.stem for f in files if READS_A_VALUE.search(f.read_text("utf-8"))}
    assert found - {"cache"} == READ_VALUES | READ_WHILE_LOADING

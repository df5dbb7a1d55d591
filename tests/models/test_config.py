import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvstow import ModelFileError, ModelNotFound
from kvstow.models import context_length, read_config
from kvstow.models.gguf_file import read_gguf
from kvstow.models.skeleton import config_dtype


def test_a_gguf_tells_its_bytes_and_its_number_of_weights(tiny_gguf):
    path = tiny_gguf()
    found = read_config(str(path))
    tensors = read_gguf(path).tensors.values()
    assert found.n_weights == sum(tensor.size for tensor in tensors)
    assert found.weight_bytes == 4 * found.n_weights  # float32 in this file
    assert found.context_length == 256


def test_a_directory_tells_its_config_and_the_size_of_its_safetensors(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "head_dim": 64}')
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 20)
    (tmp_path / "other.safetensors").write_bytes(b"x")  # mlx-lm does not read it
    found = read_config(str(tmp_path))
    assert (found.config["head_dim"], found.weight_bytes, found.n_weights) == (64, 120, None)


def directory(folder, config, **tensors):
    """A model whose safetensors files have headers and nothing else: name=(dtype, shape)."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    for name, (dtype, shape) in tensors.items():
        tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        header = json.dumps({"__metadata__": {"dtype": "F16"}, "weight": tensor}).encode()
        data = len(header).to_bytes(8, "little") + header
        (folder / f"model-{name}.safetensors").write_bytes(data)
    return str(folder)


@pytest.mark.parametrize(
    "config", [{}, {"torch_dtype": "bfloat16"}, {"text_config": {"dtype": "bfloat16"}}]
)
def test_a_directory_has_the_dtype_of_most_of_its_floats(tmp_path, config):
    tensors = {"a": ("BF16", [3]), "b": ("F32", [5, 2]), "c": ("I64", [99])}
    found = read_config(directory(tmp_path, config, **tensors))
    assert (config_dtype(found.config), found.n_weights) == ("float32", 13)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_the_size_of_a_quantised_directory_does_not_follow_the_dtype(tmp_path, key):
    tensors = {"a": ("U32", [50]), "b": ("F16", [4])}
    found = read_config(directory(tmp_path, {key: {"bits": 4}}, **tensors))
    assert (config_dtype(found.config), found.n_weights) == ("float16", None)


@pytest.mark.parametrize("shape", ["x", None, ["x"], [[]]])
def test_a_damaged_header_leaves_the_number_of_weights_unknown(tmp_path, shape):
    found = read_config(directory(tmp_path, {}, a=("F32", [2]), b=("F32", shape)))
    assert (found.n_weights, "torch_dtype" in found.config) == (None, False)
    assert found.weight_bytes


@pytest.mark.parametrize("key", ["max_position_embeddings", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_config_without_layers_or_context_is_damaged(tmp_path, key, value):
    for config in ({key: value}, {"text_config": {key: value}}):
        with pytest.raises(ModelFileError, match=f"damaged: '{key}' must be positive, got {value}"):
            read_config(directory(tmp_path, config, a=("F32", [2])))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 3}', b"\xff\xfe"])
def test_a_config_that_is_no_config_is_refused(tmp_path, text):
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "config.json").write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_config(str(tmp_path))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository, and nothing else."""
    pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    files = [
        SimpleNamespace(rfilename="model-1.safetensors", size=70),
        SimpleNamespace(rfilename="model-2.safetensors", size=30),
        SimpleNamespace(rfilename="README.md", size=5),
    ]

    def download(name, filename):
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        if name != "owner/name":
            raise RuntimeError("404 Client Error\nand much more")
        return str(tmp_path / filename)

    class HfApi:
        def model_info(self, name, *, files_metadata):
            assert (name, files_metadata) == ("owner/name", True)
            return SimpleNamespace(siblings=files)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi", HfApi)
    return files


@pytest.mark.usefixtures("hub")
def test_a_hub_id_tells_its_config_and_the_size_of_its_weights():
    found = read_config("owner/name")
    assert (found.config, found.weight_bytes) == ({"model_type": "qwen3"}, 100)


def test_a_size_that_the_hub_does_not_tell_is_unknown(hub):
    hub[0].size = None
    assert read_config("owner/name").weight_bytes is None


@pytest.mark.usefixtures("hub")
def test_the_hubs_client_logs_no_retries(caplog):
    level = logging.getLogger("huggingface_hub").level
    read_config("owner/name")
    assert not caplog.records
    assert logging.getLogger("huggingface_hub").level == level


@pytest.mark.usefixtures("hub")
def test_a_name_that_the_hub_does_not_know_is_refused_with_its_reason():
    with pytest.raises(ModelNotFound, match=r"'owner/other' is no file .*: 404 Client Error \("):
        read_config("owner/other")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"text_config": "llama"}, None),
        ({"text_config": ["llama"], "n_positions": 1024}, 1024),
    ],
)
def test_the_context_length_is_found_where_configs_keep_it(config, tokens):
    assert context_length(config) == tokens


def test_reading_a_config_imports_no_mlx(tiny_gguf):
    code = (
        "import sys; from kvstow.models import read_config; read_config(sys.argv[1]);"
        "assert not {'mlx.core', 'mlx_lm', 'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_gguf())], check=True)

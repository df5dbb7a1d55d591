import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from kvstow import ModelFileError
from kvstow.cache_dir import cache_dir
from kvstow.models import convert as module
from kvstow.models import read_config
from kvstow.models.convert import ABANDONED_AFTER_S, convert, converted_dir
from kvstow.models.skeleton import config_dtype

pytest.importorskip("transformers")
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def entries(cache):
    """What is in the cache's directory of models, hidden entries included."""
    return sorted(path.name for path in (cache / "models").iterdir())


def test_a_conversion_is_made_once_and_found_again(tiny_gguf, cache):
    path = tiny_gguf()
    first = convert(path, "float32")
    assert {file.name for file in first.iterdir()} >= FILES
    calls = []
    assert convert(path, "float32", lambda *call: calls.append(call)) == first
    assert calls == []  # neither read again nor converted again
    assert entries(cache) == [first.name]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_converted_model_says_its_dtype_and_its_number_of_weights(tiny_gguf, dtype):
    path = tiny_gguf()
    converted = convert(path, dtype)
    assert json.loads((converted / "config.json").read_text())["torch_dtype"] == dtype
    found = read_config(str(converted))
    assert config_dtype(found.config) == dtype
    assert found.n_weights == read_config(str(path)).n_weights


def test_the_directory_is_keyed_by_contents_and_dtype(tiny_gguf, cache, monkeypatch):
    path, other = tiny_gguf(), tiny_gguf(seed=1)
    copy = shutil.copy(path, path.with_name("copy.gguf"))
    key = {name: converted_dir(name, "float32").name.rpartition("-")[2] for name in (path, other)}
    assert key[path] != key[other]
    assert converted_dir(path.with_name("copy.gguf"), "float32").name.endswith(key[path]), copy
    assert not converted_dir(path, "bfloat16").name.endswith(key[path])
    monkeypatch.setattr(module, "CONVERTER_VERSION", module.CONVERTER_VERSION + 1)
    assert not converted_dir(path, "float32").name.endswith(key[path])
    assert not (cache / "models").exists()


@pytest.mark.usefixtures("cache")
def test_a_file_replaced_under_its_name_is_another_model(tiny_gguf):
    path, other = tiny_gguf(), tiny_gguf(seed=1)
    first = converted_dir(path, "float32")
    other.replace(path)
    assert converted_dir(path, "float32") != first


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ModelFileError, OSError])
def test_an_interrupted_conversion_leaves_nothing(tiny_gguf, cache, monkeypatch, stop):
    def fail(*args):
        args[3].write_bytes(b"half")
        raise stop("stop")

    monkeypatch.setattr(module, "write_weights", fail)
    with pytest.raises(ModelFileError if stop is OSError else stop, match="stop"):
        convert(tiny_gguf(), "float32")
    assert entries(cache) == []


def test_a_killed_conversion_is_not_picked_up_and_is_removed_later(tiny_gguf, cache):
    path = tiny_gguf()
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from importlib import import_module\n"
        "module = import_module('kvstow.models.convert')\n"
        "module.write_weights = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "module.convert(Path(sys.argv[1]), 'float32')"
    )
    run = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True)
    assert run.returncode == -signal.SIGKILL
    (left,) = entries(cache)
    whole = convert(path, "float32")
    assert entries(cache) == sorted([left, whole.name])  # it might still be at work

    shutil.rmtree(whole)
    long_ago = time.time() - ABANDONED_AFTER_S - 1
    os.utime(cache / "models" / left, (long_ago, long_ago))
    convert(path, "float32")
    assert entries(cache) == [whole.name]


def test_two_conversions_at_once_both_succeed(tiny_gguf, cache):
    path, nested = tiny_gguf(), []

    def while_the_first_is_at_work(*call):
        if call[2].startswith("Converting") and not nested:
            nested.append(None)
            nested[0] = convert(path, "float32")

    first = convert(path, "float32", while_the_first_is_at_work)
    assert nested == [first]
    assert entries(cache) == [first.name]


def test_a_full_disk_is_refused_before_the_work(tiny_gguf, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ModelFileError, match=r"needs .* GB in .*0\.0 GB is free; KVSTOW_CACHE"):
        convert(tiny_gguf(), "float32")
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(tiny_gguf, cache):
    cache.write_text("a file where the directory should be")
    with pytest.raises(ModelFileError, match=r"cannot write .*KVSTOW_CACHE names another"):
        convert(tiny_gguf(), "float32")


def test_a_bad_file_or_dtype_is_refused_before_anything_is_written(tiny_gguf, cache):
    path = tiny_gguf()
    with pytest.raises(ModelFileError, match="dtype must be"):
        convert(path, "float64")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelFileError, match="truncated"):
        convert(path, "float32")
    assert not cache.exists()


def test_the_cache_is_in_the_platforms_place_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("KVSTOW_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    places = {}
    for platform in ("linux", "darwin", "win32"):
        monkeypatch.setattr(sys, "platform", platform)
        places[platform] = cache_dir().relative_to(tmp_path).as_posix()
    assert places == {
        "linux": ".cache/kvstow",
        "darwin": "Library/Caches/kvstow",
        "win32": "AppData/Local/kvstow/Cache",
    }
    monkeypatch.setenv("KVSTOW_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"

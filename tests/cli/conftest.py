"""The real program, on tiny models that it loads from real files."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvstow.cli import main

LLAMA = {
    "model_type": "llama",
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Tiny GGUF files, and a cache for what they are converted to."""
    pytest.importorskip("mlx_lm")
    folder = tmp_path_factory.mktemp("tiny")
    gguf_writer = pytest.importorskip("tests.models.conftest").gguf_writer
    write = gguf_writer(folder)
    llama = write()
    truncated = folder / "truncated.gguf"
    truncated.write_bytes(llama.read_bytes()[:-100])
    return SimpleNamespace(
        llama=llama,
        truncated=truncated,
        untemplated=gguf_writer(folder, chat_template="")("qwen3"),
        foreign=write(named="mamba"),
        other=write(seed=1),
        gemma3=write("gemma3"),
        cache=folder / "cache",
    )


@pytest.fixture
def cli(tiny, monkeypatch):
    """Run a command of the program in this process, where it leaves nothing behind."""
    base = pytest.importorskip("mlx_lm.models.base")
    before = base.quantized_scaled_dot_product_attention
    monkeypatch.setenv("KVSTOW_CACHE", str(tiny.cache))
    yield lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])
    assert base.quantized_scaled_dot_product_attention is before


@pytest.fixture
def program(tiny):
    """Start ``kvstow serve`` on a free port; ``lines`` is what it said until it was ready.

    Where there is ``code``, it starts the program in the place of ``-m kvstow``.
    """
    started = []

    def start(*args, code=None, **env):
        how = ["-m", "kvstow"] if code is None else ["-c", code]
        process = subprocess.Popen(
            [sys.executable, *how, "serve", "--port", "0", *map(str, args)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"KVSTOW_CACHE": str(tiny.cache)} | env,
        )
        started.append(process)
        process.lines = []
        for line in process.stderr:
            process.lines.append(line)
            if found := re.search(r"at (http://\S+)/v1", line):
                process.url = found[1]
                return process
        raise AssertionError("".join(process.lines))

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def refused(cli):
    """Run a command, check that it ends with `code` and one error message, and return that."""

    def run(*args, code):
        result = cli(*args)
        assert isinstance(result.exception, SystemExit), result.exception
        assert (result.exit_code, result.stdout) == (code, "")
        assert [line[:7] for line in result.stderr.splitlines()].count("Error: ") == 1
        return result.stderr

    return run


@pytest.fixture
def no_load(monkeypatch):
    """Fail where weights would be loaded or converted."""
    for command in ("generate", "bench", "draft", "cache.save"):
        module = pytest.importorskip(f"kvstow.cli.{command}")
        monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("weights are loaded"))


@pytest.fixture
def directory(tmp_path):
    """Make a directory with the config of a tiny llama, and weights that nothing can load."""

    def make(**more):
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA | more))
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder

    return make

"""Packages are missing in a fresh interpreter only: mlx cannot be imported twice in one."""

import json
import subprocess
import sys

import pytest

import kvstow
from kvstow.require import require

WITHOUT = "import sys; sys.modules[sys.argv[1]] = None; sys.argv[1:] = sys.argv[2:]\n"


def run_without(package, code, *arguments):
    command = [sys.executable, "-c", WITHOUT + code, package, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_a_module_that_is_there_is_imported():
    assert require("json") is json


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(kvstow.MissingDependency, match=r"needs nope: pip install 'kvstow\[mlx\]'"):
        require("nope.inner")


def test_a_module_of_ours_names_the_package_that_it_lacks():
    code = "from kvstow.require import require; require('kvstow.session')"
    last = run_without("mlx", code).stderr.splitlines()[-1]
    assert "MissingDependency: this needs mlx: pip install 'kvstow[mlx]'" in last


def test_a_module_of_ours_that_does_not_exist_is_a_bug():
    with pytest.raises(ModuleNotFoundError) as caught:
        require("kvstow.nope")
    assert not isinstance(caught.value, kvstow.KvstowError)


@pytest.mark.parametrize("command", ["generate -p hi", "fit"])
def test_a_command_without_mlx_ends_with_what_to_install(tmp_path, command):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    arguments = [*command.split(), "--model", str(tmp_path)]
    out = run_without("mlx", "from kvstow.cli import main; main()", *arguments)
    assert out.returncode == 1
    assert out.stderr.startswith("Error: this needs mlx: pip install 'kvstow[mlx]'")
    assert out.stderr.count("\n") == 1

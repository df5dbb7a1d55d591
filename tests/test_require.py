import json
import subprocess
import sys

import pytest

import kvstow
from kvstow.require import require


def test_a_module_that_is_there_is_imported():
    assert require("json") is json


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(kvstow.MissingDependency, match=r"needs nope: pip install 'kvstow\[mlx\]'"):
        require("nope.inner")
    with pytest.raises(kvstow.MissingDependency, match=r"pip install 'kvstow\[eval\]'"):
        require("nope.inner", extra="eval")


def test_a_module_of_ours_names_the_package_that_it_lacks():
    code = (
        "import sys; sys.modules['mlx'] = None;"
        "from kvstow.require import require; require('kvstow.session')"
    )
    out = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "MissingDependency: this needs mlx: pip install 'kvstow[mlx]'" in out.stderr


def test_a_module_of_ours_that_does_not_exist_is_a_bug():
    with pytest.raises(ModuleNotFoundError) as caught:
        require("kvstow.nope")
    assert not isinstance(caught.value, kvstow.KvstowError)

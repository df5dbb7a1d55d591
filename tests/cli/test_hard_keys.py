"""The program warns, in one line, of a scheme that a model's keys do not survive."""

import json
import warnings

import numpy as np
import pytest

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def hard(tmp_path_factory):
    """A GGUF model with large constants in the keys of its second layer."""
    files = pytest.importorskip("tests.models.conftest")
    bias = np.zeros(files.KV_HEADS * files.HEAD_DIM, np.float32)
    bias[31::32] = 60.0  # channels that positions hardly rotate
    write = files.gguf_writer(tmp_path_factory.mktemp("hard"))
    return write("qwen2", tensors={"blk.1.attn_k.bias": bias})


def warnings_of(result):
    assert result.exit_code == 0, result.output
    return [line for line in result.stderr.splitlines() if "warning" in line.lower()]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_generate_warns_in_exactly_one_line_of_standard_error(cli, hard, options):
    ask = ("generate", "--model", hard, "--prompt", "hi", "--max-tokens", 2, *options)
    (line,) = warnings_of(cli(*ask, "--kv-quant", "turbo:k4v3"))
    assert line.startswith("warning: turbo:k4v3 may garble this model's text")
    assert "turbo:k8v3 keeps them, for 2 bits more per value" in line


def test_json_holds_the_warning_too(cli, hard):
    ask = ("generate", "--model", hard, "--prompt", "hi", "--max-tokens", 2, "--json")
    (warning,) = json.loads(cli(*ask, "--kv-quant", "turbo:k4v3").stdout)["warnings"]
    assert "turbo:k8v3 keeps them" in warning
    assert json.loads(cli(*ask, "--kv-quant", "turbo:k8v3").stdout)["warnings"] == []


@pytest.mark.parametrize("scheme", ["turbo:k8v3", "off"])
def test_generate_does_not_warn_where_keys_have_eight_bits(cli, hard, scheme):
    ask = ("generate", "--model", hard, "--prompt", "hi", "--max-tokens", 2)
    assert warnings_of(cli(*ask, "--kv-quant", scheme)) == []


def test_generate_does_not_warn_of_a_model_with_easy_keys(cli, tiny):
    ask = ("generate", "--model", tiny.llama, "--prompt", "hi", "--max-tokens", 2)
    assert warnings_of(cli(*ask, "--kv-quant", "turbo:k4v3")) == []


def test_a_measurement_of_many_arms_does_not_warn(cli, hard):
    ask = ("eval", "kl", "--model", hard, "--texts", 1, "--prefix", 8, "--steps", 2)
    result = cli(*ask, "--arm", "turbo:k4v3", "--arm", "turbo:k4v8", "--arm", "affine:4")
    assert warnings_of(result) == []


def test_a_filter_given_to_python_turns_the_line_off(cli, hard, monkeypatch):
    monkeypatch.setattr("sys.warnoptions", ["ignore"])
    ask = ("generate", "--model", hard, "--prompt", "hi", "--max-tokens", 2)
    with warnings.catch_warnings(action="ignore"):  # what Python does of such an option
        assert warnings_of(cli(*ask, "--kv-quant", "turbo:k4v3")) == []


def test_refusals_and_prices_need_no_weights_and_do_not_warn(cli, hard):
    result = cli("fit", "--model", hard, "--kv-quant", "turbo:k4v3", "--memory", "1GB")
    assert warnings_of(result) == []

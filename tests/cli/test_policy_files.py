"""``--kv-policy`` of generate and fit: a file in the place of a scheme."""

import json

import pytest

pytestmark = pytest.mark.mlx
pytest.importorskip("mlx.core")


@pytest.fixture
def policy(tmp_path):
    """Write a policy; returns the path."""

    def write(content):
        path = tmp_path / "policy.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_layers_take_the_schemes_of_the_file(cli, tiny, policy):
    path = policy({"default": "turbo:k8v8", "rules": [{"layers": 1, "scheme": "turbo:k8v2"}]})
    args = ("--model", tiny.llama, "--prompt", "hi", "--max-tokens", 3, "--kv-policy", path)
    result = cli("generate", *args, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["layers"]["schemes"] == {"turbo:k8v8": [0], "turbo:k8v2": [1]}
    assert said["scheme"] == "policy(turbo:k8v8; 1: turbo:k8v2)"
    shown = cli("generate", *args)
    assert "turbo:k8v2 1 (1)" in shown.stderr


def test_a_draft_model_is_under_the_default_of_the_policy(cli, tiny, policy):
    path = policy({"default": "turbo:k8v8", "rules": [{"layers": 1, "scheme": "turbo:k8v2"}]})
    args = ("--model", tiny.llama, "--draft-model", tiny.llama, "--prompt", "hi", "--json")
    result = cli("generate", *args, "--max-tokens", 3, "--kv-policy", path)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["draft"]["scheme"] == "turbo:k8v8"


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("{", (), "is not JSON"),
        ({"rules": [{"layers": 1, "scheme": "turbo:k9v9"}]}, (), "key bits must be one of"),
        ({"rules": [{"layers": 9, "scheme": "off"}]}, (), "names layers 9"),
        ({}, ("--kv-quant", "turbo:k8v8"), "give one of"),
        ({"default": "affine:8"}, ("--fetch", "eager"), "needs a turbo scheme"),
    ],
)
def test_a_file_that_cannot_be_meant_is_a_usage_error(
    refused, tiny, policy, content, options, said
):
    args = ("--model", tiny.llama, "--prompt", "hi", "--kv-policy", policy(content))
    assert said in refused("generate", *args, *options, code=2)


def test_a_file_that_is_not_there_is_a_usage_error(refused, tiny, tmp_path):
    args = ("--model", tiny.llama, "--prompt", "hi", "--kv-policy", tmp_path / "none.json")
    assert "does not exist" in refused("generate", *args, code=2)


def test_fit_prices_a_policy_beside_the_schemes(cli, tiny, policy):
    path = policy({"default": "turbo:k8v8", "rules": [{"layers": 1, "scheme": "turbo:k8v2"}]})
    asked = ("fit", "--model", tiny.llama, "--kv-policy", path)
    schemes = ("--kv-quant", "turbo:k8v8", "--kv-quant", "turbo:k8v2")
    result = cli(*asked, *schemes, "--json")
    assert result.exit_code == 0, result.output
    one, other, mixed = json.loads(result.stdout)["schemes"]
    assert mixed["bytes_per_token"] == (one["bytes_per_token"] + other["bytes_per_token"]) / 2
    assert "policy" in cli(*asked).stdout


def test_fit_refuses_a_policy_about_other_layers(refused, tiny, policy):
    path = policy({"rules": [{"layers": 9, "scheme": "off"}]})
    assert "names layers 9" in refused("fit", "--model", tiny.llama, "--kv-policy", path, code=2)

import json
import os
import sys

import pytest
from click.testing import CliRunner

from kvstow.cli import main
from kvstow.cli.fit import SCHEMES

pytestmark = pytest.mark.mlx
pytest.importorskip("mlx_lm")

GEMMA3_4B = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
    },
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
FALCON_H1 = LLAMA_8B | {
    "model_type": "falcon_h1",
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 4096,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 64,
}
MINIMAX_M3 = {
    "model_type": "minimax_m3_vl",
    "text_config": LLAMA_8B
    | {
        "index_block_size": 64,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk_blocks": 16,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "sparse_attention_freq": [0, 0, 0, 1],
    },
}
DEEPSEEK_V3 = LLAMA_8B | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "num_hidden_layers": 2,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GPT_OSS = LLAMA_8B | {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "sliding_window": 128,
}
WEIGHT_BYTES = 1_000_000


@pytest.fixture
def fit(tmp_path):
    """Run ``kvstow fit`` on a directory with a config and a file of `WEIGHT_BYTES` weights."""

    def run(config, *options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(WEIGHT_BYTES)
        return CliRunner().invoke(main, ["fit", "--model", str(tmp_path), *options])

    return run


def report(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_every_scheme_has_a_row_in_the_order_of_the_list(fit):
    rows = report(fit(LLAMA_8B, "--json"))["schemes"]
    assert [row["scheme"] for row in rows] == list(SCHEMES)
    assert [row["bytes_per_token"] for row in rows[:2]] == [131072, 69632]


def test_the_schemes_asked_for_are_shown_and_no_others(fit):
    options = ["--kv-quant", "turbo:k8v3", "--kv-quant", "off", "--json"]
    rows = report(fit(LLAMA_8B, *options))["schemes"]
    assert [row["scheme"] for row in rows] == ["turbo:k8v3", "off"]
    assert rows[0]["bytes_per_token"] == 32 * 8 * 200
    assert rows[0]["compression_ratio"] == 2.56


def test_weights_come_from_the_size_of_the_files(fit):
    assert report(fit(LLAMA_8B, "--json"))["weight_bytes"] == WEIGHT_BYTES


def test_more_memory_holds_more_context_up_to_the_limit_of_the_model(fit):
    options = ["--kv-quant", "turbo:k8v3", "--json", "--memory"]
    fits = [
        report(fit(LLAMA_8B, *options, memory))["schemes"][0]["fits"]
        for memory in ("2GB", "2GiB", "40GB")
    ]
    assert fits[0]["tokens"] < fits[1]["tokens"] < fits[2]["tokens"] == 131072
    assert [fit["bound"] for fit in fits] == ["memory", "memory", "model"]


def test_a_context_of_some_tokens_is_priced_in_parts(fit):
    options = ["--kv-quant", "turbo:k8v3", "--json", "--tokens", "1000"]
    needed = report(fit(LLAMA_8B, *options))["schemes"][0]["at_tokens"]
    assert needed["cache_bytes"] == 1024 * 32 * 8 * 200
    parts = ("cache_bytes", "fixed_bytes", "working_bytes")
    assert needed["total_bytes"] == sum(needed[part] for part in parts)


def test_working_memory_is_that_of_the_device_that_mlx_has(fit, monkeypatch):
    codec = pytest.importorskip("kvstow.codec.mlx")
    options = ["--kv-quant", "off", "--tokens", "10000"]
    needed = {}
    for on_gpu, device in ((True, "gpu"), (False, "cpu")):
        monkeypatch.setattr(codec, "on_gpu", lambda on_gpu=on_gpu: on_gpu)
        said = report(fit(LLAMA_8B, *options, "--json"))
        assert said["device"] == device
        needed[device] = said["schemes"][0]["at_tokens"]["working_bytes"]
        assert f"Working memory is that of a {device.upper()}" in fit(LLAMA_8B, *options).output
    assert needed["cpu"] - needed["gpu"] == 32 * 2048 * 40 * 256 * 2  # scores in bfloat16


def test_a_sliding_window_is_a_fixed_cost(fit):
    result = report(fit(GEMMA3_4B, "--kv-quant", "off", "--tokens", "100000", "--json"))
    assert result["layers"] == {"full": 5, "plain": 0, "sliding": 29, "bounded": 0, "recurrent": 0}
    assert result["schemes"][0]["bytes_per_token"] == 5 * 4 * 2 * 256 * 2
    assert "29 have a window of 1,024 tokens, a fixed cost." in fit(GEMMA3_4B).output


def test_a_sliding_window_takes_the_bytes_of_the_scheme(fit):
    options = ("--kv-quant", "off", "--kv-quant", "turbo:k8v3", "--kv-quant", "affine:8")
    rows = report(fit(GEMMA3_4B, *options, "--tokens", "100000", "--json"))["schemes"]
    off, turbo, affine = (row["at_tokens"]["fixed_bytes"] for row in rows)
    assert off / turbo == 2.56
    assert affine == off  # mlx-lm has no affine cache for them


def test_the_table_shows_the_same_numbers(fit):
    lines = fit(LLAMA_8B, "--memory", "20GB", "--tokens", "1000").output.splitlines()
    headings = ["bytes/token", "smaller", "context", "bound", "by", "cache", "fixed", "working"]
    assert lines[0].split() == ["scheme", *headings, "together"]
    (turbo,) = (line.split() for line in lines if line.startswith("turbo:k8v3 "))
    assert turbo[:5] == ["turbo:k8v3", "51,200", "2.56x", "131,072", "model"]


def test_a_scheme_that_refuses_the_model_stays_in_the_table_with_its_reason(fit):
    config = LLAMA_8B | {"head_dim": 80}
    rows = {
        row["scheme"]: row for row in report(fit(config, "--json", "--memory", "20GB"))["schemes"]
    }
    assert "the model has 80" in rows["turbo:k8v3"]["refused"]
    assert "the model has 80" in rows["affine:8"]["refused"]
    assert rows["off"]["fits"]["tokens"] > 0
    table = fit(config, "--memory", "20GB").output
    assert "needs head_dim in (64, 128, 256, 512), the model has 80" in table


def test_memory_smaller_than_the_weights_is_an_error(fit):
    result = fit(LLAMA_8B, "--memory", "1MB")
    assert result.exit_code == 1
    assert "1.0 MB of memory does not hold the model's weights, which take 1.0 MB" in result.output


def test_memory_that_holds_the_weights_and_no_token_fits_none(fit):
    result = report(fit(LLAMA_8B, "--memory", "1.1MB", "--kv-quant", "off", "--json"))
    assert result["schemes"][0]["fits"] == {"tokens": 0, "bound": "memory"}


def test_a_config_that_lacks_a_key_is_an_error_that_names_it(fit):
    result = fit({k: v for k, v in LLAMA_8B.items() if k != "num_hidden_layers"})
    expected = "Error: the config of this llama lacks 'num_hidden_layers'\n"
    assert (result.exit_code, result.output) == (1, expected)


def test_a_model_type_that_mlx_lm_lacks_is_an_error_that_names_it(fit):
    result = fit(LLAMA_8B | {"model_type": "rwkv99"})
    assert result.exit_code == 1
    assert "does not run the model type 'rwkv99'" in result.output


def test_latent_attention_is_priced_without_a_scheme_and_refused_under_one(fit):
    result = report(fit(DEEPSEEK_V3, "--json"))
    off, *others = result["schemes"]
    assert off["bytes_per_token"] == 2 * (512 + 64) * 2
    assert all("multi-head latent attention (kv_lora_rank 512)" in x["refused"] for x in others)


def test_a_scheme_that_the_models_own_code_cannot_take_is_refused(fit):
    rows = {row["scheme"]: row for row in report(fit(GPT_OSS, "--json"))["schemes"]}
    assert "does not support attention sinks" in rows["affine:8"]["refused"]
    assert rows["turbo:k8v3"]["bytes_per_token"] == 16 * 8 * 100


def test_a_hybrid_counts_its_states(fit):
    result = report(fit(FALCON_H1, "--tokens", "1", "--json"))
    assert result["layers"] == {"full": 32, "plain": 0, "sliding": 0, "bounded": 0, "recurrent": 32}
    off = result["schemes"][0]
    conv = 3 * (4096 + 2 * 128) * 2
    ssm = 64 * 64 * 128 * 4  # kept in float32, whatever the dtype
    assert off["at_tokens"]["fixed_bytes"] == 32 * (conv + ssm)
    output = fit(FALCON_H1).output
    assert "32 have a state of fixed size: " in output


def test_layers_that_grow_and_stay_plain_are_counted_beside_those_under_the_scheme(fit):
    result = report(fit(MINIMAX_M3, "--json"))
    assert result["layers"] == {"full": 3, "plain": 2, "sliding": 0, "bounded": 0, "recurrent": 0}
    rows = {row["scheme"]: row["bytes_per_token"] for row in result["schemes"]}
    plain = 2 * 8 * 128 * 2 + 128 * 2  # keys and values of one layer, and the keys of its indexer
    assert rows["off"] == 3 * 2 * 8 * 128 * 2 + plain
    assert rows["turbo:k8v3"] == 3 * 8 * 200 + plain
    assert "2 more grow and stay as they are under every scheme." in fit(MINIMAX_M3).output


def test_without_mlx_it_says_what_to_install(fit, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", None)
    result = fit(LLAMA_8B)
    assert result.exit_code == 1
    assert "pip install 'kvstow[mlx]'" in result.output


@pytest.mark.parametrize(
    "options", [["--memory", "x"], ["--tokens", "0"], ["--kv-quant", "turbo:k8"]]
)
def test_an_option_that_cannot_be_read_is_a_usage_error(fit, options):
    result = fit(LLAMA_8B, *options)
    assert result.exit_code == 2
    assert f"Invalid value for '{options[0]}'" in result.output


def test_a_wider_dtype_doubles_what_is_not_packed(fit):
    options = ["--kv-quant", "off", "--kv-quant", "turbo:k8v3", "--json"]
    half, single = (
        report(fit(LLAMA_8B, *options, "--dtype", dtype)) for dtype in ("bfloat16", "float32")
    )
    assert single["dtype_bytes"] == 2 * half["dtype_bytes"] == 4
    before, after = ([row["bytes_per_token"] for row in x["schemes"]] for x in (half, single))
    assert (after[0], after[1]) == (2 * before[0], before[1])


@pytest.mark.model
def test_the_demo_model_is_priced_as_it_will_be_loaded():
    options = ["fit", "--json", "--kv-quant", "turbo:k8v3", "--dtype"]
    half, single = (CliRunner().invoke(main, [*options, d]) for d in ("bfloat16", "float32"))
    if half.exit_code and os.environ.get("KVSTOW_REQUIRE_DEMO") != "1":
        pytest.skip(half.output)
    assert report(half)["layers"] == {
        "full": 30,
        "plain": 0,
        "sliding": 0,
        "bounded": 0,
        "recurrent": 0,
    }
    assert report(half)["schemes"][0]["bytes_per_token"] == 30 * 3 * 100
    assert report(half)["weight_bytes"] == 2 * 134_515_008
    assert report(single)["weight_bytes"] == 4 * 134_515_008
    on_gpu = report(single)["device"] == "gpu"
    unasked = report(CliRunner().invoke(main, options[:-1]))
    assert unasked["weight_bytes"] == (2 if on_gpu else 4) * 134_515_008

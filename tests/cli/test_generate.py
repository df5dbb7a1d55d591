import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstow import Scheme

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
command = pytest.importorskip("kvstow.cli.generate")

SCHEMES = ("off", "affine:8", "affine:4", "affine:8g32", "turbo", "turbo:k4v2", "turbo:k8v3+stored")
KEYS = {
    "attention_calls",
    "text",
    "scheme",
    "fetch",
    "layers",
    "warnings",
    "prompt_tokens",
    "generation_tokens",
    "prompt_tokens_per_s",
    "generation_tokens_per_s",
    "finish_reason",
    "kv_tokens",
    "kv_capacity_tokens",
    "kv_bytes",
    "kv_bytes_bf16",
    "kv_nonfinite_groups",
    "peak_memory_bytes",
    "draft",
    "processes",
    "resumed_tokens",
    "prefix_cache",
}


@pytest.fixture
def generate(cli, tiny):
    """Answer "hi" with the tiny llama; the one JSON object that is printed."""

    def run(*options, model=tiny.llama, prompt=("--prompt", "hi"), max_tokens=3):
        args = ["--model", model, *prompt, "--max-tokens", max_tokens, "--json", *options]
        result = cli("generate", *args)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\n") == 1
        return json.loads(result.stdout)

    return run


@pytest.fixture
def demo(smollm2, monkeypatch):
    """The demo model, loaded once for all tests."""
    monkeypatch.setattr(command, "load", lambda *_, **__: smollm2)
    return "smollm2"


def kv_bytes(scheme, n_layers, n_kv_heads, capacity, dtype_bytes=4):
    one_head = Scheme.parse(scheme).bytes_per_token(64, dtype_bytes=dtype_bytes)
    return n_layers * n_kv_heads * one_head * capacity


# The answer


def test_the_text_goes_to_stdout_and_the_rest_to_stderr(cli, tiny):
    result = cli("generate", "--model", tiny.llama, "--prompt", "hi", "--max-tokens", 3)
    assert result.exit_code == 0
    for line in ("scheme      turbo:k8v3: 2 of 2 layers", "KV cache ", "memory "):
        assert line in result.stderr
        assert line not in result.stdout


def test_json_is_one_object_with_the_documented_keys(generate):
    report = generate()
    assert set(report) == KEYS
    assert report["layers"] == {"quantised": 2, "kept": 0, "reasons": {}}
    assert (report["scheme"], report["fetch"]) == ("turbo:k8v3", "deferred")
    assert (report["generation_tokens"], report["finish_reason"]) == (3, "length")
    assert report["kv_tokens"] == report["prompt_tokens"] + 3
    assert (report["kv_capacity_tokens"], report["kv_nonfinite_groups"]) == (256, 0)
    assert report["prompt_tokens_per_s"] > 0
    assert report["generation_tokens_per_s"] > 0
    assert report["peak_memory_bytes"] > report["kv_bytes"]
    assert report["draft"] is None
    assert report["attention_calls"] == {}


def test_fused_without_a_gpu_is_refused_before_weights_load(refused, no_load, tiny):  # noqa: ARG001
    args = ("generate", "--model", tiny.llama, "--prompt", "hi", "--fetch", "fused")
    assert "fused kernels need a GPU: mlx has no CUDA" in refused(*args, code=1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_answers_and_takes_the_bytes_it_says(generate, scheme):
    report = generate("--kv-quant", scheme, "--dtype", "float32")
    assert report["scheme"] == str(Scheme.parse(scheme))
    assert report["kv_bytes"] == kv_bytes(scheme, 2, 2, report["kv_capacity_tokens"])
    assert report["kv_bytes_bf16"] == 2 * 2 * 2 * 2 * 64 * report["kv_capacity_tokens"]


@pytest.mark.parametrize("fetch", ["eager", "deferred"])
def test_the_path_that_is_asked_for_is_taken_and_reported(generate, fetch):
    assert generate("--fetch", fetch)["fetch"] == fetch


def test_a_prompt_is_the_same_from_the_option_and_from_a_file(generate, tmp_path):
    (tmp_path / "prompt").write_text("hi there", encoding="utf-8")
    given = generate(prompt=("--prompt", "hi there"))
    read = generate(prompt=("--prompt-file", tmp_path / "prompt"))
    assert given["prompt_tokens"] == read["prompt_tokens"]
    assert given["text"] == read["text"]


def test_a_dash_reads_the_prompt_from_standard_input(tiny):
    args = ["generate", "--model", str(tiny.llama), "--prompt", "-", "--json", "-m", "1"]
    done = run_program(*args, tiny=tiny, stdin="h\u00e9".encode())
    assert (done.returncode, json.loads(done.stdout)["prompt_tokens"]) == (0, len("<s>h..</s>") - 5)


def test_sampling_with_a_seed_can_be_repeated(generate):
    sampled = [generate("--temp", "1", "--seed", seed, max_tokens=12)["text"] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_chat_template_is_used_where_there_is_one(generate, tiny):
    plain = generate("--no-chat-template")["prompt_tokens"]
    templated = generate()["prompt_tokens"]
    with_system = generate("--system-prompt", "hi")["prompt_tokens"]
    assert plain < templated < with_system
    assert generate(model=tiny.untemplated)["prompt_tokens"] == plain


def test_an_answer_ends_where_the_context_does(generate):
    report = generate("--no-chat-template", prompt=("--prompt", "x" * 250), max_tokens=100)
    assert report["prompt_tokens"] + report["generation_tokens"] == 256


# What is refused. The order is that in which a user would meet it.


@pytest.mark.parametrize("scheme", ["int4", "turbo:k8", "turbo:k8v3+fast", ""])
def test_an_unknown_scheme_is_a_usage_error_with_the_grammar(refused, scheme):
    error = refused("generate", "--kv-quant", scheme, "--prompt", "hi", code=2)
    assert "off | affine:<4|8>[g<32|64>] | turbo" in " ".join(error.split())


@pytest.mark.parametrize(
    ("scheme", "what"), [("turbo:k3v3", "key bits"), ("turbo:k8v7", "value bits")]
)
def test_a_width_that_there_is_not_is_a_usage_error_with_those_there_are(refused, scheme, what):
    error = " ".join(refused("generate", "--kv-quant", scheme, "--prompt", "hi", code=2).split())
    assert f"{what} must be one of (2, " in error


@pytest.mark.parametrize(
    "options",
    [
        ["--max-tokens", "0"],
        ["--temp", "-1"],
        ["--top-p", "2"],
        ["--fetch", "fast"],
        ["--dtype", "int8"],
        ["--prompt-file", "absent"],
    ],
)
def test_an_option_out_of_range_is_a_usage_error_on_its_flag(refused, options):
    error = refused("generate", "--prompt", "hi", *options, code=2)
    assert f"Invalid value for '{options[0]}'" in error


@pytest.mark.parametrize("flag", ["--top-p", "--top-k", "--min-p"])
def test_a_sampling_option_that_greedy_decoding_would_ignore_is_a_usage_error(refused, flag):
    assert f"{flag} needs --temp above 0" in refused("generate", "-p", "hi", flag, "1", code=2)


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize("flag", ["--temp", "--top-p", "--min-p"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_not_finite_is_a_usage_error(refused, flag, value):
    assert f"Invalid value for '{flag}'" in refused("generate", "-p", "hi", flag, value, code=2)


def test_a_seed_beyond_64_bits_is_a_usage_error(refused):
    assert "'--seed'" in refused("generate", "-p", "hi", "--seed", str(2**64), code=2)


def test_a_prompt_that_is_no_text_is_a_usage_error(refused):
    assert "not UTF-8" in refused("generate", "-p", "caf\udce9", code=2)


def test_a_system_prompt_without_the_template_is_a_usage_error(refused):
    args = ["generate", "-p", "hi", "--system-prompt", "x", "--no-chat-template"]
    assert "--system-prompt needs the chat template" in refused(*args, code=2)


def test_a_byte_order_mark_is_not_part_of_the_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfhi")
    assert command.read_prompt(None, path) == "hi"


def test_more_tokens_than_there_are_means_all_of_them(cli, tiny):
    args = ["--model", tiny.llama, "-p", "hi", "-m", 2, "--temp", 1, "--seed", 1]
    everything, more = (cli("generate", *args, "--top-k", k, "--json") for k in (0, 10**6))
    assert json.loads(more.stdout)["text"] == json.loads(everything.stdout)["text"]


def test_a_full_disk_is_one_line_and_exit_code_1(tiny):
    with Path("/dev/full").open("wb") as full:
        program = [sys.executable, "-m", "kvstow", "generate", "--model", str(tiny.llama)]
        environment = os.environ | {"KVSTOW_CACHE": str(tiny.cache)}
        done = subprocess.run(
            [*program, "-p", "hi", "-m", "2"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment,
            check=False,
        )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"No space left" in done.stderr


@pytest.mark.parametrize("scheme", ["off", "affine:8"])
def test_a_fetch_path_without_a_turbo_scheme_is_a_usage_error(refused, scheme):
    args = ["generate", "-p", "hi", "--kv-quant", scheme, "--fetch", "eager"]
    error = " ".join(refused(*args, code=2).split())
    assert f"--fetch eager needs a turbo scheme, got --kv-quant {scheme}" in error


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_a_usage_error(refused, prompt):
    assert "the prompt is empty (--prompt)" in refused("generate", "--prompt", prompt, code=2)


@pytest.mark.usefixtures("no_load")
def test_a_prompt_comes_from_exactly_one_source(refused, tmp_path):
    (tmp_path / "prompt").write_text("hi")
    both = ("--prompt", "hi", "--prompt-file", tmp_path / "prompt")
    assert "got both" in refused("generate", *both, code=2)
    assert "got neither" in refused("generate", code=2)


@pytest.mark.usefixtures("no_load")
def test_a_prompt_file_that_is_no_text_is_a_usage_error(refused, tmp_path):
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    error = refused("generate", "--prompt-file", tmp_path / "prompt", code=2)
    assert "the prompt is not UTF-8 text" in error


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./absent.gguf", "no such file or directory"),
        ("smol", "no such model"),
        ("truncated", "truncated.gguf is truncated: tensor "),
        ("foreign", "architecture 'mamba'"),
    ],
)
def test_a_model_that_is_not_there_or_damaged_is_an_error_that_says_so(
    refused, tiny, model, message
):
    model = getattr(tiny, model, model)
    assert message in refused("generate", "--model", model, "--prompt", "hi", code=1)


LATENT = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MAMBA = {
    "model_type": "mamba",
    "conv_kernel": 4,
    "state_size": 8,
    "time_step_rank": 8,
    "use_bias": False,
    "use_conv_bias": True,
}


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"head_dim": 80}, [], "needs head_dim in (64, 128, 256, 512), the model has 80"),
        ({"head_dim": 80}, ["--kv-quant", "affine:8"], "a multiple of 64, the model has 80"),
        (LATENT, [], "multi-head latent attention (kv_lora_rank 512)"),
        (MAMBA, [], "would apply to no layer of this model: recurrent layer has a state"),
        (
            {"model_type": "plamo3", "window_size": 32},
            ["--kv-quant", "affine:8"],
            "would apply to no layer of this model: mlx-lm's affine cache has no sliding window",
        ),
        ({"model_type": "gemma2"}, ["--fetch", "deferred"], "cannot take packed windows"),
        ({"model_type": "rwkv99"}, [], "does not run the model type 'rwkv99'"),
        ({"model_file": "modeling.py"}, [], "needs code of its own ('modeling.py')"),
        ({"num_hidden_layers": None}, [], "makes no llama of this config"),
    ],
)
def test_a_model_that_cannot_be_attached_is_refused_before_its_weights_load(
    refused, directory, config, options, message
):
    args = ["generate", "--model", directory(**config), "--prompt", "hi", *options]
    assert message in refused(*args, code=1)


def test_without_a_scheme_every_model_goes_on_to_its_weights(refused, directory):
    args = ["generate", "--model", directory(head_dim=80), "--prompt", "hi", "--kv-quant", "off"]
    assert "mlx-lm cannot load" in refused(*args, code=1)


@pytest.mark.parametrize("n_letters", [256, 1000])
def test_a_prompt_beyond_the_context_is_refused_before_it_is_read(
    refused, tiny, monkeypatch, n_letters
):
    session = pytest.importorskip("kvstow.session")
    monkeypatch.setattr(session, "stream_generate", lambda *_, **__: pytest.fail("it is read"))
    prompt = ["--prompt", "x" * n_letters, "--no-chat-template"]
    error = refused("generate", "--model", tiny.llama, *prompt, code=1)
    assert f"the prompt has {n_letters} tokens and leaves no room" in error
    assert "context is 256 tokens" in error


def test_the_context_is_that_of_the_config_where_mlx_lm_drops_it(cli, tiny, monkeypatch):
    sessions = []
    runs = pytest.importorskip("kvstow.session")
    own = runs.Session

    def remember(model, *args, **options):
        model.args.max_position_embeddings = None  # as the args of gemma2, gpt_oss and others
        sessions.append(own(model, *args, **options))
        return sessions[-1]

    monkeypatch.setattr(runs, "Session", remember)
    cli("generate", "--model", tiny.llama, "--prompt", "hi", "-m", 1)
    assert sessions[0].context_tokens == 256


def test_a_system_prompt_for_a_tokenizer_without_a_template_is_refused(refused, tiny):
    args = ["--model", tiny.untemplated, "--prompt", "hi", "--system-prompt", "be brief"]
    error = refused("generate", *args, code=1)
    assert "needs the chat template, and this tokenizer has none" in error


# The program as a process


def run_program(*args, tiny, stdin=b"", code="from kvstow.cli import main; main()"):
    environment = os.environ | {"KVSTOW_CACHE": str(tiny.cache)}
    environment.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    program = [sys.executable, "-c", code, *args]
    return subprocess.run(program, input=stdin, capture_output=True, env=environment, check=False)


WITHOUT_MLX = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "mlx_lm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from kvstow.cli import main
main()
"""


@pytest.mark.parametrize("verb", [["generate", "-p", "hi"], ["bench", "--tokens", "9"], ["fit"]])
@pytest.mark.parametrize("scheme", ["off", "turbo:k8v3"])
def test_without_mlx_the_program_says_what_to_install(tiny, verb, scheme):
    args = [*verb, "--model", str(tiny.llama), "--kv-quant", scheme]
    done = run_program(*args, tiny=tiny, code=WITHOUT_MLX)
    error = done.stderr.decode()
    assert (done.returncode, done.stdout) == (1, b"")
    assert "pip install 'kvstow[mlx]'" in error
    assert "Traceback" not in error


def test_a_refusal_is_one_line_and_no_traceback(tiny, directory):
    args = ["generate", "--model", str(directory(head_dim=80)), "--prompt", "hi"]
    done = run_program(*args, tiny=tiny)
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (1, b"")
    assert line.startswith("Error: turbo:k8v3 needs head_dim in (64, 128, 256, 512)")


def test_a_first_run_says_nothing_but_its_own(tiny, tmp_path):
    tiny.cache = tmp_path / "fresh"  # the conversion imports what mlx-lm alone does not
    done = run_program("generate", "--model", str(tiny.llama), "-p", "hi", "-m", "1", tiny=tiny)
    lines = [line.split(" ")[0] for line in done.stderr.decode().splitlines() if line]
    if lines[0] == "BLAS:":  # on a Linux CPU
        del lines[0]
    assert lines == ["scheme", "prompt", "generation", "KV", "memory"]


# The demo model


@pytest.mark.model
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_demo_model_answers_under_every_scheme(generate, demo, scheme):
    question = ("--prompt", "What is the capital of France?")
    report = generate("--kv-quant", scheme, model=demo, prompt=question, max_tokens=4)
    assert report["generation_tokens"] == 4
    assert report["kv_bytes"] == kv_bytes(scheme, 30, 3, 256)


@pytest.mark.model
@pytest.mark.parametrize("scheme", ["off", "turbo:k8v3"])
def test_the_demo_model_knows_the_capital_of_france(generate, demo, scheme):
    question = ("--prompt", "What is the capital of France?")
    report = generate("--kv-quant", scheme, model=demo, prompt=question, max_tokens=12)
    assert "Paris" in report["text"]

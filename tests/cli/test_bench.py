import json

import pytest

from kvstow import ModelFileError, UnsupportedModel
from kvstow.cli.refuse import refuse
from kvstow.scheme import Scheme

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
command = pytest.importorskip("kvstow.cli.bench")
deferred = pytest.importorskip("kvstow.integrations.mlx_lm.deferred")

SCHEMES = ("off", "affine:8", "turbo:k8v3")
ENVIRONMENT = {"bench", "model", "started", "command", "commit", "machine", "device", "blas"}
ENVIRONMENT |= {"kvstow", "mlx", "mlx_lm"}
MEASURED = {
    "prompt_tokens_per_s",
    "decode_tokens_per_s",
    "decode_ms",
    "decode_vs_off",
    "attention_share",
    "encode_share",
    "kv_bytes",
    "kv_bytes_bf16",
    "peak_memory_bytes",
}
CONFIG = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "sliding_window": 32,
    "vocab_size": 50,
}
NO_KERNEL = "[quantized_matmul] No implementation for problem shape"


@pytest.fixture
def bench(cli, tiny):
    def run(*options, contexts=(20, 40), schemes=SCHEMES, model=tiny.llama):
        args = [x for n in contexts for x in ("--tokens", n)]
        args += [x for scheme in schemes for x in ("--kv-quant", scheme)]
        return cli("bench", "--model", model, "--rounds", 1, *args, *options)

    return run


@pytest.fixture
def rows(bench):
    def run(*options, **more):
        result = bench("--json", *options, **more)
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    return run


@pytest.fixture
def no_affine_kernel(monkeypatch):
    """Affine caches decode only while their graph is probed, as on a back-end without a kernel."""
    own, others = mx.quantized_matmul, set(deferred._owners)  # of models that other tests left

    def fail(*args, **options):
        if deferred._owners - others:
            raise RuntimeError(f"{NO_KERNEL}\nand where it was called")
        return own(*args, **options)

    monkeypatch.setattr(mx, "quantized_matmul", fail)


def test_there_is_a_row_for_each_length_and_scheme(rows):
    found = rows()
    expected = [(n, scheme) for n in (20, 40) for scheme in SCHEMES]
    assert [(row["context_tokens"], row["scheme"]) for row in found] == expected
    for row in found:
        assert set(row) == ENVIRONMENT | MEASURED | {"scheme", "fetch", "context_tokens", "refused"}
        assert row["refused"] is None
        assert row["decode_tokens_per_s"] == pytest.approx(1e3 / row["decode_ms"], rel=0.05)
        assert row["decode_vs_off"] > 0
        assert row["attention_share"] > 0
        assert row["kv_bytes_bf16"] == 256 * 2 * 2 * 2 * 64 * 2
    off, affine, turbo = found[:3]
    assert (off["fetch"], affine["fetch"], turbo["fetch"]) == ("host", "host", "deferred")
    assert off["decode_vs_off"] == 1
    assert turbo["kv_bytes"] < affine["kv_bytes"] < off["kv_bytes"]
    assert turbo["prompt_tokens_per_s"] > 0
    assert turbo["peak_memory_bytes"] > turbo["kv_bytes"]
    assert affine["prompt_tokens_per_s"] is affine["peak_memory_bytes"] is None
    assert off["encode_share"] < min(affine["encode_share"], turbo["encode_share"])


def test_rows_are_appended_to_the_output_one_json_object_each(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["kvstow", "bench", "--output"])
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert bench("--output", path, contexts=[20], schemes=["turbo:k8v3"]).exit_code == 0
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["scheme"] for line in lines] == ["turbo:k8v3"] * 2
    assert lines[0]["command"] == "kvstow bench --output"


def test_a_context_that_is_still_exact_is_measured(rows):
    (row,) = rows(contexts=[20], schemes=["turbo:k8v3+start100"])
    assert row["refused"] is None
    assert row["kv_bytes"] > row["kv_bytes_bf16"]  # plain, in float32


def test_a_fetch_path_without_a_turbo_scheme_is_a_usage_error(refused):
    args = ["bench", "--kv-quant", "off", "--fetch", "deferred"]
    assert "--fetch deferred needs a turbo scheme" in refused(*args, code=2)


def test_without_off_there_is_nothing_to_compare_with(rows):
    (row,) = rows(contexts=[20], schemes=["turbo:k8v3"])
    assert row["decode_vs_off"] is None


def test_the_path_that_is_asked_for_is_that_of_the_turbo_arms(rows):
    off, affine, turbo = rows("--fetch", "eager", contexts=[20])
    assert (off["fetch"], affine["fetch"], turbo["fetch"]) == ("host", "host", "eager")


def test_the_table_has_the_same_rows(bench):
    result = bench(contexts=[20])
    assert result.exit_code == 0, result.output
    (turbo,) = (line for line in result.stdout.splitlines() if "turbo:k8v3" in line)
    assert "deferred" in turbo
    assert "refused" not in result.stdout


@pytest.mark.usefixtures("no_affine_kernel")
def test_an_arm_that_the_host_cannot_run_is_a_row_with_its_reason(rows):
    for row in rows():
        assert row["refused"] == (NO_KERNEL if row["scheme"] == "affine:8" else None)
        measured = {row[key] for key in MEASURED - {"prompt_tokens_per_s", "peak_memory_bytes"}}
        assert (measured == {None}) == bool(row["refused"])
        assert row["scheme"] != "turbo:k8v3" or None not in measured


@pytest.mark.usefixtures("no_affine_kernel")
def test_a_refused_arm_is_shown_in_the_table_with_its_reason_once(bench):
    result = bench()
    assert result.exit_code == 0, result.output
    assert sum("affine:8" in x and "refused" in x for x in result.stdout.splitlines()) == 3
    assert result.stdout.count(f"affine:8 is refused: {NO_KERNEL}") == 1


def test_an_arm_that_fails_while_it_reads_the_prompt_ends_alone(rows, monkeypatch):
    measure = pytest.importorskip("kvstow.evaluate.bench")
    own = measure._prefill

    def fail(model, arm, tokens):
        if str(arm.scheme) == "turbo:k8v3":
            raise RuntimeError("[malloc] too much")
        return own(model, arm, tokens)

    monkeypatch.setattr(measure, "_prefill", fail)
    reasons = [row["refused"] for row in rows(contexts=[20])]
    assert reasons == [None, None, "[malloc] too much"]


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize("scheme", ["turbo:k8v3", "affine:8"])
def test_a_model_that_no_scheme_can_store_is_refused_before_its_weights_load(
    refused, directory, scheme
):
    args = ["--model", directory(head_dim=80), "--kv-quant", "off", "--kv-quant", scheme]
    args += ["--tokens", 20]
    assert "the model has 80" in refused("bench", *args, code=1)


def test_a_model_that_some_schemes_can_store_is_measured_under_those():
    affine, turbo = Scheme.parse("affine:8"), Scheme.parse("turbo:k8v3")
    refuse(CONFIG, [affine, turbo], "auto", None)
    with pytest.raises(UnsupportedModel, match="attention sinks"):
        refuse(CONFIG, [Scheme.parse("off"), affine], "auto", None)
    refuse(CONFIG, [turbo], "deferred", None)
    own_attention = CONFIG | {"model_type": "gemma2", "rms_norm_eps": 1e-5}
    with pytest.raises(UnsupportedModel, match="cannot take packed windows"):
        refuse(own_attention, [turbo], "deferred", None)


def test_a_config_that_says_too_little_is_refused_where_something_is_quantised():
    config = {"model_type": "llama"}
    refuse(config, [Scheme.parse("off")], "auto", None)
    with pytest.raises(ModelFileError, match="lacks 'hidden_size'"):
        refuse(config, [Scheme.parse("turbo")], "auto", None)


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(("tokens", "rounds"), [(256, 1), (245, 1), (197, 9), (10**6, 1)])
def test_a_context_beyond_the_models_is_refused_before_its_weights_load(
    refused, tiny, tokens, rounds
):
    args = ["--model", tiny.llama, "--tokens", 20, "--tokens", tokens, "--rounds", rounds]
    error = " ".join(refused("bench", *args, code=2).split())
    assert f"--tokens {tokens} and {6 * (rounds + 1)} decode steps do not fit" in error
    assert "the model's context of 256 tokens" in error


def test_a_context_that_just_fits_is_measured(rows):
    (row,) = rows(contexts=[244], schemes=["turbo:k8v3"])
    assert row["decode_ms"] > 0


@pytest.mark.parametrize(
    "options", [["--tokens", "0"], ["--rounds", "0"], ["--kv-quant", "turbo:k3v3"]]
)
def test_an_option_that_cannot_be_read_is_a_usage_error(refused, options):
    assert f"Invalid value for '{options[0]}'" in refused("bench", *options, code=2)


@pytest.mark.model
def test_the_demo_model_has_sane_rows(rows, smollm2, monkeypatch):
    monkeypatch.setattr(command, "load", lambda *_, **__: smollm2)
    off, turbo = rows(contexts=[64], schemes=["off", "turbo:k8v3"], model="smollm2")
    assert (off["kv_bytes"], turbo["kv_bytes"]) == (256 * 30 * 3 * 512, 256 * 30 * 3 * 100)
    assert turbo["attention_share"] > 0 < turbo["encode_share"]

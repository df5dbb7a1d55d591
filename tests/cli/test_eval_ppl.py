import json

import pytest

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
run_module = pytest.importorskip("kvstow.cli.eval.run")

SMALL = ("--texts", 2, "--tokens", 40, "--chunk", 8)


@pytest.fixture
def ppl(cli, tiny):
    def run(*options, small=SMALL):
        return cli("eval", "ppl", "--model", tiny.llama, *small, *options)

    return run


def rows_of(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_is_one_row_per_arm(ppl):
    off, k8v3 = rows_of(ppl("--json", "--arm", "off", "--arm", "turbo:k8v3"))
    assert (off["measure"], off["arm"], off["mean_change_nats"]) == ("ppl", "off", 0)
    assert k8v3["window"] == {"n_tokens": 40, "chunk_tokens": 8}
    assert k8v3["texts"]["n_texts"] == 2
    assert k8v3["mean_change_nats"] != 0
    assert k8v3["kv_bytes"] < k8v3["kv_bytes_bf16"]
    assert {"bits_per_value", "layers", "fetch", "model", "commit", "machine"} <= set(k8v3)


def test_people_get_a_table(ppl):
    result = ppl("--arm", "turbo:k8v3")
    assert result.exit_code == 0, result.output
    assert "chunks of 8" in " ".join(result.stdout.split())
    assert "turbo:k8v3 \u2502 deferred \u2502 2 of 2" in result.stdout


def test_rows_of_a_file_are_not_measured_again(ppl, tmp_path, monkeypatch):
    output = tmp_path / "rows.jsonl"
    options = ("--json", "--arm", "turbo:k8v3", "--output", output)
    first = rows_of(ppl(*options))
    perplexity = pytest.importorskip("kvstow.evaluate.perplexity")
    monkeypatch.setattr(perplexity.Reference, "score", lambda *_, **__: pytest.fail("measured"))
    assert rows_of(ppl(*options)) == first
    monkeypatch.undo()
    assert rows_of(ppl(*options, "--chunk", 4))[0]["window"]["chunk_tokens"] == 4
    assert len(output.read_text().splitlines()) == 2


def test_texts_beyond_the_context_are_refused_before_weights_load(refused, tiny, monkeypatch):
    monkeypatch.setattr(run_module, "load", lambda *_, **__: pytest.fail("weights are loaded"))
    message = refused("eval", "ppl", "--model", tiny.llama, "--tokens", 257, code=2)
    assert "--tokens 257 does not fit in the model's context of 256 tokens" in message


def test_a_window_without_scored_tokens_is_refused_before_weights_load(refused, tiny, monkeypatch):
    monkeypatch.setattr(run_module, "load", lambda *_, **__: pytest.fail("weights are loaded"))
    options = ("--tokens", 100, "--chunk", 99)
    message = refused("eval", "ppl", "--model", tiny.llama, *options, code=1)
    assert "no scored token" in message


def test_a_text_that_is_too_short_is_named(refused, tiny, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("hi", encoding="utf-8")
    message = refused(
        "eval", "ppl", "--model", tiny.llama, "--tokens", 40, "--chunk", 8, "--text", short, code=1
    )
    assert "file/short.txt has 1 tokens, and 40 are needed" in message


def test_an_arm_that_quantises_nothing_ends_the_run(refused, tiny):
    options = ("--arm", "turbo:k8v3+start200")
    message = refused("eval", "ppl", "--model", tiny.llama, *SMALL, *options, code=1)
    assert "this arm quantised nothing" in message

import json

import pytest

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
run_module = pytest.importorskip("kvstow.cli.eval.run")
measure = pytest.importorskip("kvstow.evaluate.needle")

SMALL = ("--length", 200, "--depths", 2, "--per-cell", 1)


@pytest.fixture
def needle(cli, tiny):
    def run(*options):
        return cli("eval", "needle", "--model", tiny.llama, *SMALL, *options)

    return run


@pytest.fixture
def finds_all(monkeypatch):
    """What a random model writes counts as the number."""
    monkeypatch.setattr(measure, "_found", lambda *_: True)


def rows_of(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.usefixtures("finds_all")
def test_json_is_one_row_per_arm(needle):
    off, k8v3 = rows_of(needle("--json", "--arm", "off", "--arm", "turbo:k8v3", "--prefix-hit"))
    assert (off["measure"], off["arm"], k8v3["arm"]) == ("needle", "off", "turbo:k8v3")
    assert k8v3["window"] == {
        "lengths": [200],
        "depths": [0.0, 1.0],
        "per_cell": 1,
        "prefix_hit": True,
        "chunk_tokens": 256,
    }
    assert k8v3["cells"][1] == {"length": 200, "depth": 1.0, "n": 1, "found": 1, "found_off": 1}
    assert (k8v3["score"], k8v3["score_off"], k8v3["relative"]) == (1, 1, 1)
    assert k8v3["kv_bytes"] < k8v3["kv_bytes_bf16"]
    assert {"bits_per_value", "layers", "fetch", "model", "texts", "commit"} <= set(k8v3)


@pytest.mark.usefixtures("finds_all")
def test_people_get_a_table(needle):
    result = needle("--arm", "turbo:k8v3")
    assert result.exit_code == 0, result.output
    assert "depths 0, 1; without quantisation 100%" in " ".join(result.stdout.split())
    assert "200 tokens" in result.stdout
    (row,) = (line for line in result.stdout.splitlines() if "turbo:k8v3" in line)
    assert [cell.strip() for cell in row.split("\u2502")[3:9]] == [
        "2 of 2",
        "6.25",
        "2 of 2",
        "100%",
        "34% to 100%",
        "1.00",
    ]


@pytest.mark.usefixtures("finds_all")
def test_rows_of_a_file_are_not_measured_again(needle, tmp_path, monkeypatch):
    options = ("--json", "--arm", "turbo:k8v3", "--output", tmp_path / "rows.jsonl")
    first = rows_of(needle(*options))
    monkeypatch.setattr(measure.Reference, "score", lambda *_, **__: pytest.fail("measured"))
    assert rows_of(needle(*options)) == first


@pytest.mark.usefixtures("finds_all")
def test_named_depths_and_a_text_of_ones_own_are_used(needle, tmp_path, cli, tiny):
    text = tmp_path / "own.txt"
    text.write_text("All of it is new. " * 30, encoding="utf-8")
    options = ("--length", 200, "--depth", 0.5, "--per-cell", 1, "--text", text, "--json")
    (own,) = rows_of(cli("eval", "needle", "--model", tiny.llama, "--arm", "off", *options))
    assert own["window"]["depths"] == [0.5]
    assert own["texts"]["sources"] == {"file": 1}
    assert own["texts"]["sha256"] != rows_of(needle("--arm", "off", "--json"))[0]["texts"]["sha256"]


def test_a_model_that_finds_nothing_is_refused(refused, tiny):
    message = refused("eval", "needle", "--model", tiny.llama, *SMALL, code=1)
    assert "without quantisation this model finds 0 of 2 facts" in message
    assert "try shorter lengths or a larger model" in message


def test_lengths_beyond_the_context_are_refused_before_weights_load(refused, tiny, monkeypatch):
    monkeypatch.setattr(run_module, "load", lambda *_, **__: pytest.fail("weights are loaded"))
    options = ("--length", 128, "--length", 250)
    message = refused("eval", "needle", "--model", tiny.llama, *options, code=2)
    assert "--length 250 and 10 tokens of an answer do not fit" in message
    assert "context of 256 tokens" in message


def test_depths_in_two_ways_are_refused(refused, tiny):
    options = (*SMALL, "--depth", 0.5)
    assert "got both" in refused("eval", "needle", "--model", tiny.llama, *options, code=2)


def test_a_text_that_is_too_short_is_refused(refused, tiny, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("hi", encoding="utf-8")
    options = (*SMALL, "--text", text)
    message = refused("eval", "needle", "--model", tiny.llama, *options, code=1)
    assert "the texts have 1 tokens" in message

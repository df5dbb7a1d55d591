"""`kvstow eval kl` as a program: rows, their file, and what it refuses."""

import json

import pytest

pytestmark = pytest.mark.mlx


@pytest.fixture
def text(tmp_path):
    """Two files of 40 tokens of the tiny model each."""
    paths = [tmp_path / f"{letter}.txt" for letter in "ab"]
    for path, letters in zip(paths, ("ab", "ba"), strict=True):
        path.write_text(" ".join(letters * 20))
    return paths


@pytest.fixture
def ask(tiny, text):
    """The arguments of a small measurement."""
    files = [arg for path in text for arg in ("--text", path)]
    return ["eval", "kl", "--model", tiny.llama, *files, "--prefix", 8, "--steps", 3]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_go_to_a_file_and_are_not_measured_again(cli, ask, tmp_path):
    output = tmp_path / "rows.jsonl"
    arms = ["--arm", "off", "--arm", "turbo:k4v2", "--output", output]
    first = cli(*ask, *arms)
    assert first.exit_code == 0, first.stderr
    off, turbo = before = rows_of(output)
    assert (off["mean_kl_nats"], off["arm"], off["dtype"]) == (0, "off", "float32")
    assert turbo["mean_kl_nats"] > 0
    assert turbo["kv_bytes"] < turbo["kv_bytes_bf16"]
    assert {"commit", "machine", "command", "reference_ppl"} <= set(turbo)
    assert cli(*ask, *arms, "--arm", "affine:8").exit_code == 0
    assert rows_of(output)[:2] == before
    assert [row["arm"] for row in rows_of(output)] == ["off", "turbo:k4v2", "affine:8"]


def test_every_file_is_scored_unless_fewer_are_asked_for(cli, ask):
    def n_texts(*more):
        result = cli(*ask, "--arm", "turbo:k4v2", "--json", *more)
        return json.loads(result.stdout)["texts"]["n_texts"]

    assert n_texts() == 2
    assert n_texts("--texts", 1) == 1


def test_more_texts_than_there_are_is_an_error(refused, ask):
    assert "3 texts are needed, there are 2" in refused(*ask, "--texts", 3, code=1)


def test_a_text_shorter_than_the_window_is_an_error(refused, ask):
    assert "a.txt has" in refused(*ask, "--prefix", 90, code=1)


def test_a_window_beyond_the_models_context_is_a_usage_error(refused, ask):
    error = refused(*ask, "--prefix", 1_000_000, code=2)
    assert "--prefix 1000000 and 3 steps do not fit" in error


def test_an_arm_that_quantises_nothing_is_an_error_and_earlier_rows_stay(cli, ask, tmp_path):
    output = tmp_path / "rows.jsonl"
    arms = ["--arm", "off", "--arm", "turbo:k8v3+start5000", "--output", output]
    result = cli(*ask, *arms)
    assert result.exit_code == 1
    assert "this arm quantised nothing" in result.stderr
    assert [row["arm"] for row in rows_of(output)] == ["off"]


@pytest.mark.parametrize("arm", ["turbo:k3v3", "off@eager", "paper:mse9"])
def test_what_is_no_arm_is_a_usage_error(refused, ask, arm):
    assert "Invalid value for '--arm'" in refused(*ask, "--arm", arm, code=2)


def test_a_layer_that_the_model_does_not_have_is_an_error(refused, ask):
    assert "those that can are" in refused(*ask, "--arm", "turbo:k8v3@layer99", code=1)


def test_a_file_that_holds_no_rows_is_refused_before_the_model_loads(refused, ask, text):
    assert "is no row of results" in refused(*ask, "--output", _no_rows(text[0]), code=1)


def _no_rows(path):
    other = path.with_suffix(".jsonl")
    other.write_text("{}\n")
    return other


@pytest.mark.parametrize("name", ["missing/rows.jsonl", "a.txt/rows.jsonl"])
def test_a_file_that_cannot_be_written_is_a_usage_error_before_the_model_loads(
    refused, ask, tmp_path, name
):
    said = refused(*ask, "--output", tmp_path / name, code=2)
    assert "Invalid value for '--output': cannot write" in said


def test_a_run_that_is_refused_leaves_no_file(refused, ask, tmp_path):
    output = tmp_path / "rows.jsonl"
    refused(*ask, "--output", output, "--texts", 3, code=1)
    assert not output.exists()

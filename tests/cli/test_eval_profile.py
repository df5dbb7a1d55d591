"""``kvstow eval profile`` on a tiny model."""

import json

import pytest

from kvstow.evaluate.rows import read_rows

pytestmark = pytest.mark.mlx


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("ab " * 200)
    return file


def test_the_table_ends_with_the_verdict(cli, tiny, text):
    result = cli("eval", "profile", "--model", tiny.llama, "--text", text, "--tokens", 40)
    assert result.exit_code == 0, result.stderr
    assert "2 of 2 caches are attention" in " ".join(result.stdout.split())
    assert "The keys are " in result.stdout.splitlines()[-1]


def test_layers_kl_measures_each_layer_alone_and_all_rows_are_recorded(cli, tiny, text, tmp_path):
    output = tmp_path / "rows.jsonl"
    ask = ("eval", "profile", "--model", tiny.llama, "--text", text, "--tokens", 40)
    ask = (*ask, "--layers-kl", "turbo:k4v8", "--output", output, "--json", "--name", "llama")
    result = cli(*ask)
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows == read_rows([output])
    assert [row["measure"] for row in rows] == ["profile", "kl", "kl"]
    assert [row.get("arm") for row in rows[1:]] == ["turbo:k4v8@layer0", "turbo:k4v8@layer1"]
    assert all(row["mean_kl_nats"] > 0 and row["layers"] == [1, 2] for row in rows[1:])
    assert rows[0]["texts"] == rows[1]["texts"]
    again = cli(*ask)
    assert [json.loads(line) for line in again.stdout.splitlines()] == rows


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--layers-kl", "turbo:k4v8", "--tokens", 33), "need --tokens 34 or more, got 33"),
        (("--layers-kl", "turbo:k4v8@keys"), "expected a scheme that quantises"),
        (("--layers-kl", "off"), "expected a scheme that quantises"),
        (("--layers-kl", "turbo:k3v8"), "key bits must be one of"),
        (("--tokens", 5000), "does not fit in the model's context"),
        (("--tokens", 3), "--tokens"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(refused, tiny, options, why):
    said = refused("eval", "profile", "--model", tiny.llama, *options, code=2)
    assert why in " ".join(said.split())


def test_a_text_that_is_too_short_is_one_line(refused, tiny, tmp_path):
    (tmp_path / "short.txt").write_text("ab ab")
    ask = ("eval", "profile", "--model", tiny.llama, "--text", tmp_path / "short.txt")
    assert "tokens, and 160 are needed" in refused(*ask, code=1)

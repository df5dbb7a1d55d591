"""``kvstow eval profile --write-policy``: a file that other commands take, checked by KL."""

import json

import pytest

from kvstow.evaluate.rows import read_rows
from kvstow.policy import Policy

pytestmark = pytest.mark.mlx


@pytest.fixture
def texts(tmp_path):
    """Options that name four short texts."""
    options = []
    for i, words in enumerate(("ab ", "ba ", "abc ", "c ab ")):
        file = tmp_path / f"text{i}.txt"
        file.write_text(words * 120)
        options += ["--text", file]
    return options


def test_a_policy_is_written_checked_on_other_texts_and_taken_by_the_rest(
    cli, tiny, texts, tmp_path
):
    path, output = tmp_path / "policy.json", tmp_path / "rows.jsonl"
    ask = ("eval", "profile", "--model", tiny.llama, "--tokens", 40, *texts, "--output", output)
    result = cli(*ask, "--write-policy", path, "--budget", "turbo:k5v4+search")
    assert result.exit_code == 0, result.stderr
    policy = Policy.read(path)
    assert all(scheme.search for scheme in policy.schemes)
    rows = read_rows([output])
    assert [row.get("arm") for row in rows] == [
        None,
        *(f"turbo:{w}+search@layer{i}" for i in (0, 1) for w in ("k5v8", "k8v3")),
        "turbo:k5v4+search",
        str(policy),
    ]
    assert rows[1]["texts"]["n_texts"] == rows[-1]["texts"]["n_texts"] == 2
    assert rows[1]["texts"]["sha256"] != rows[-1]["texts"]["sha256"]
    assert rows[-1]["kv_bytes"] <= rows[-2]["kv_bytes"]
    assert "other texts" in result.stderr
    assert f"wrote {path}" in result.stderr

    ask = ("eval", "kl", "--model", tiny.llama, *texts, "--prefix", 20, "--steps", 4)
    result = cli(*ask, "--arm", f"policy:{path}", "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = map(json.loads, result.stdout.splitlines())
    assert row["arm"] == str(policy)
    shown = cli(*ask, "--arm", f"policy:{path}")
    assert "policy#" in shown.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--budget", "turbo:k8v4"), "--budget needs --write-policy"),
        (("--write-policy", "p.json", "--budget", "affine:8"), "expected a turbo scheme"),
        (("--write-policy", "nowhere/p.json"), "there is no directory nowhere"),
        (("--write-policy", "p.json", "--tokens", 33), "need --tokens 34 or more"),
        (("--write-policy", "p.json", "--texts", 1), "needs two texts or more"),
    ],
)
def test_what_cannot_be_proposed_is_a_usage_error(refused, tiny, options, why):
    said = refused("eval", "profile", "--model", tiny.llama, *options, code=2)
    assert why in " ".join(said.split())

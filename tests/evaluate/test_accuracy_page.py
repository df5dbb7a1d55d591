"""The tables of docs/accuracy.md and of the README are the recorded results."""

import json
import runpy
from pathlib import Path

import pytest

import kvstow
from kvstow.evaluate.selection import distinct

ROOT = Path(kvstow.__file__).parents[2]
PAGE = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORD = ROOT / "benchmarks" / "results" / "quality.jsonl"
ROWS = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
BY_ARM = {(row["model"], row["arm"]): row for row in ROWS}


def test_the_tables_are_written_from_the_rows():
    tool = runpy.run_path(str(ROOT / "tools" / "make_accuracy_docs.py"))
    assert tool["page"](PAGE) == PAGE, "run tools/make_accuracy_docs.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {row['arm']}")
def test_every_row_is_in_the_table_of_its_model(row):
    table = PAGE.partition(f"### {row['model']}\n")[2].partition("\n##")[0]
    low, high = row["interval_95"]
    assert (
        f"| {row['bits_per_value']:g} | {row['mean_kl_nats']:.5f} | {low:.5f} to {high:.5f} |"
        in next(line for line in table.splitlines() if line.startswith(f"| `{row['arm']}` |"))
    )
    assert row["commit"] in table


def test_each_question_has_one_answer():
    assert len(distinct(ROWS)) == len(ROWS)


@pytest.mark.parametrize("model", sorted({row["model"] for row in ROWS}))
def test_kl_falls_with_the_bits_of_values_and_the_control_is_zero(model):
    assert BY_ARM[model, "off"]["mean_kl_nats"] == 0
    arms = [f"turbo:k8v{bits}" for bits in (2, 3, 4, 8)]
    means = [BY_ARM[model, arm]["mean_kl_nats"] for arm in arms if (model, arm) in BY_ARM]
    assert means == sorted(means, reverse=True)
    assert len(means) >= 2


def test_the_readme_shows_the_same_figures():
    named = [row for row in ROWS if row["model"] == "SmolLM2-135M-Instruct"]
    shown = {row["arm"]: row["mean_kl_nats"] for row in named if f"`{row['arm']}`" in README}
    assert {"affine:8", "turbo:k8v3", "turbo:k8v3+search", "turbo:k4v3"} <= set(shown)
    for arm, mean in shown.items():
        line = next(x for x in README.splitlines() if x.startswith("|") and f"`{arm}`" in x)
        figure = line.replace("*", "").split("|")[4].strip()
        digits = len(figure.partition(".")[2])
        assert figure == (f"{mean:.{digits}f}" if digits else "0")

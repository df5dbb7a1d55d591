"""Rows from when sliding windows stayed as they were are told apart from later ones."""

import json
from pathlib import Path

import pytest

import kvstow
from kvstow.evaluate.arms import Arm

ROOT = Path(kvstow.__file__).parents[2]
LINES = (ROOT / "benchmarks" / "results" / "quality.jsonl").read_text(encoding="utf-8")
ROWS = list(map(json.loads, LINES.splitlines()))


def kept_windows(row):
    """Whether it is one; mlx-lm's affine cache still keeps them."""
    return row["arm"].startswith("turbo") and any(
        reason.startswith("sliding window") for reason in row["kept"]
    )


@pytest.mark.parametrize("text", sorted({row["arm"] for row in ROWS if kept_windows(row)}))
def test_the_page_says_what_an_arm_of_then_is_called_now(text):
    """If these rows are measured again, this test and its paragraph have nothing to say."""
    assert not Arm.parse(text).full
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert "what the turbo rows here measured is the arm `@full` now" in page


def test_a_row_counts_the_layers_that_were_quantised():
    for row in filter(kept_windows, ROWS):
        quantised, n_layers = row["layers"]
        assert quantised == n_layers - sum(map(len, row["kept"].values())) > 0

"""The tables of docs/distortion.md are the recorded results."""

import json
from pathlib import Path

import pytest

import kvstow

ROOT = Path(kvstow.__file__).parents[2]
PAGE = (ROOT / "docs" / "distortion.md").read_text(encoding="utf-8")
RECORD = ROOT / "benchmarks" / "results" / "distortion.jsonl"
ROWS = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
BY_NAME = {(row["quantiser"], row["bits"], row["head_dim"]): row for row in ROWS}


def line(*cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


@pytest.mark.parametrize("bits", range(1, 5))
def test_the_papers_figures_stand_beside_those_recorded(bits):
    mse, prod = (BY_NAME[f"paper:{kind}", bits, 1536] for kind in ("mse", "prod"))
    cells = [mse["mse"], mse["exact"], mse["paper_mse"]]
    cells += [prod["product"], prod["exact"], prod["paper_product"]]
    assert line(bits, *cells) in PAGE


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['quantiser']}{r['bits']}d{r['head_dim']}")
def test_every_quantiser_of_dimension_128_is_in_the_table(row):
    keys = ("quantiser", "bits", "bits_per_value", "mse", "product", "parallel", "gain")
    assert row["head_dim"] != 128 or line(*(row[key] for key in keys)) in PAGE


def test_the_page_names_the_command_and_the_commit():
    text = " ".join(PAGE.split())
    assert {row["command"] in text and row["commit"] in text for row in ROWS} == {True}

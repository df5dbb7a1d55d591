"""The table of docs/reliability.md is the recorded rows, and the tests it names are there."""

import json
import re
import runpy
from pathlib import Path

import kvstow

ROOT = Path(kvstow.__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
ROWS = (ROOT / "benchmarks/results/load.jsonl").read_text(encoding="utf-8").splitlines()


def test_the_table_is_the_recorded_one():
    tool = runpy.run_path(str(ROOT / "tools/make_reliability_docs.py"))
    assert tool["page"](PAGE) == PAGE, "run tools/make_reliability_docs.py"


def test_nothing_that_was_recorded_failed():
    assert len(ROWS) > 1
    assert [row["failures"] for row in map(json.loads, ROWS)] == [[]] * len(ROWS)


def test_every_test_that_is_named_is_there():
    named = set(re.findall(r"`(tests/[\w/.]+)`", PAGE))
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []

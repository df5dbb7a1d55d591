"""Numbers in docs/kernels.md are those of the recorded rows."""

import json
import runpy
from pathlib import Path

import pytest

import kvstow

ROOT = Path(kvstow.__file__).parents[2]
PAGE = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"


def rows(file_name, bench):
    lines = (RESULTS / file_name).read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["bench"] == bench]


def test_the_tables_are_those_of_the_recorded_rows():
    tool = runpy.run_path(str(ROOT / "tools/make_kernels_docs.py"))
    assert tool["page"](PAGE) == PAGE, "run tools/make_kernels_docs.py"


def test_what_the_page_says_of_prompts_is_the_recorded_ratio_on_a_gpu():
    found = {
        (row["queries"], row["tokens"], row["head_dim"], row["dtype"]): row["vs_decode"]
        for row in rows("prefill.jsonl", "prefill")
        if row["way"] == "kernel"
    }
    if not found:
        pytest.skip("prompts were not timed on a GPU yet")
    few, many = (found[n, 16384, 128, "bfloat16"] for n in (512, 2048))
    said = (
        f"{few:.2f} times as fast as decoding the window and mlx's own attention for 512 queries, "
        f"and {many:.2f} times as fast for 2048"
    )
    assert said in " ".join(PAGE.split())


def test_nothing_that_was_recorded_was_wrong():
    kinds = "kernel_encode", "kernel_attention", "kernel_append"
    found = [row for kind in kinds for row in rows("kernels_parity.jsonl", kind)]
    parts = [part for row in found for part in row["parts"]]
    assert len(parts) > 100
    assert all(part["ok"] for part in parts)
    assert not any(part.get("differing") for part in parts)

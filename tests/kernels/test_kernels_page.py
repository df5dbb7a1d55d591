"""Numbers in docs/kernels.md are those of the recorded rows."""

import json
import re
from pathlib import Path

import pytest

import kvstow
from kvstow.scheme import KEY_BITS, VALUE_BITS

ROOT = Path(kvstow.__file__).parents[2]
PAGE = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results"


def rows(file_name, bench):
    lines = (RESULTS / file_name).read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["bench"] == bench]


def line(row):
    """A row of the first table."""
    heads = "/".join(map(str, row["heads"]))
    shape = f"{row['batch']} | {row['tokens'] // 1024}k | {heads} | {row['head_dim']}"
    read = f"{row['fused_tb_per_s']:.2f}"
    if row["bf16_us"] is None:
        return f"| {shape} | {row['n_queries']} | none | {row['fused_us']:.1f} us |  | {read} |  |"
    times = f"{row['bf16_us']:.1f} us | {row['fused_us']:.1f} us | {row['vs_bf16']:.2f}"
    limit = f"{100 * row['of_byte_limit']:.0f}%"
    return f"| {shape} | {row['n_queries']} | {times} | {read} | {limit} |"


def test_the_table_of_the_default_scheme_is_the_recorded_one():
    want = [line(row) for row in rows("kernels.jsonl", "kernel_decode") if "k8v3" in row["scheme"]]
    measured = PAGE.partition("## Measured")[2].partition("\n## ")[0]
    assert re.findall(r"^\| \d+ \| \d+k .*$", measured, re.MULTILINE) == want


def test_the_table_of_widths_is_the_recorded_one():
    found = {}
    for row in rows("kernels.jsonl", "kernel_decode"):
        if (row["batch"], row["tokens"], row["heads"], row["head_dim"], row["n_queries"]) == (
            16, 65_536, [32, 8], 128, 1,
        ):  # fmt: skip
            cell = f"{row['vs_bf16']:.2f} ({100 * row['of_byte_limit']:.0f}%)"
            found[row["scheme"]] = cell
    for k in KEY_BITS:
        cells = " | ".join(found[f"turbo:k{k}v{v}"] for v in VALUE_BITS)
        assert f"| {k} bits | {cells} |" in PAGE


def test_the_table_of_calls_through_mlx_is_the_recorded_one():
    cells = {
        (row["batch"], row["tokens"], row["scheme"]): row
        for row in rows("fetch.jsonl", "fetch")
        if (row["fetch"], row["dtype"], row["head_dim"]) == ("fused", "bfloat16", 128)
    }
    want = []
    for batch, tokens in sorted({cell[:2] for cell in cells}):
        line = f"| {batch} | {tokens // 1024}k |"
        for scheme in ("turbo:k8v3", "turbo:k4v3"):
            row = cells[batch, tokens, scheme]
            line += f" {1e3 * row['median_ms']:.0f} us, {row['vs_off']:.2f} |"
            line += f" {row['vs_affine8']:.1f} |"
        want.append(line)
    through_mlx = PAGE.partition("## Called through MLX")[2]
    assert re.findall(r"^\| \d+ \| \d+k .*$", through_mlx, re.MULTILINE) == want


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

"""Write what was recorded of the kernels into `docs/kernels.md`. Run it after recording.

Usage: python tools/make_kernels_docs.py

From kernels.jsonl what stands between ``<!-- begin alone -->`` and ``<!-- end alone -->``, and the
same for ``widths`` and ``others``; from fetch.jsonl ``calls``. All else is written by hand.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstow.scheme import KEY_BITS, VALUE_BITS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
WIDTHS_SHAPE = 16, 65_536, [32, 8], 128, 1


def page(text: str) -> str:
    """`text` with the tables and figures written again."""
    rows = recorded("kernels.jsonl")
    made = {
        "alone": alone(rows),
        "widths": widths(rows),
        "others": others(rows),
        "calls": calls(recorded("fetch.jsonl")),
    }
    for name, lines in made.items():
        text = filled(text, name, lines)
    return text


def recorded(name: str) -> list[Row]:
    """Rows of a file."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def filled(text: str, name: str, lines: Iterable[str]) -> str:
    """`text` with these lines between two marks."""
    before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
    _, end, after = rest.partition(f"<!-- end {name} -->")
    return "\n".join([before + begin, *lines, "", end + after])


def of(rows: Sequence[Row], bench: str) -> list[Row]:
    """The rows of one benchmark."""
    return [row for row in rows if row["bench"] == bench]


def alone(rows: Sequence[Row]) -> Iterator[str]:
    """The default scheme against bfloat16: a line for each shape."""
    yield (
        "| batch | tokens | heads | head_dim | query tokens | bfloat16 | k8v3 | times faster "
        "| TB/s | of the byte limit |"
    )
    yield "|---" * 10 + "|"
    for row in of(rows, "kernel_decode"):
        if row["scheme"] != "turbo:k8v3":
            continue
        heads = "/".join(map(str, row["heads"]))
        shape = f"{row['batch']} | {row['tokens'] // 1024}k | {heads} | {row['head_dim']}"
        host, faster, limit = "none", "", ""
        if row["bf16_us"] is not None:
            host, faster = f"{row['bf16_us']:.1f} us", f"{row['vs_bf16']:.2f}"
            limit = f"{row['of_byte_limit']:.0%}"
        times = f"{host} | {row['fused_us']:.1f} us | {faster} | {row['fused_tb_per_s']:.2f}"
        yield f"| {shape} | {row['n_queries']} | {times} | {limit} |"


def widths(rows: Sequence[Row]) -> Iterator[str]:
    """Every pair of widths at one shape: keys down, values across."""
    shape = ("batch", "tokens", "heads", "head_dim", "n_queries")
    cells = {
        row["scheme"]: f"{row['vs_bf16']:.2f} ({row['of_byte_limit']:.0%})"
        for row in of(rows, "kernel_decode")
        if tuple(row[name] for name in shape) == WIDTHS_SHAPE
    }
    yield f"| keys \\ values | {' | '.join(f'{bits} bits' for bits in VALUE_BITS)} |"
    yield "|---" * (1 + len(VALUE_BITS)) + "|"
    for k in KEY_BITS:
        yield f"| {k} bits | {' | '.join(cells[f'turbo:k{k}v{v}'] for v in VALUE_BITS)} |"


def others(rows: Sequence[Row]) -> Iterator[str]:
    """Kernels that store, rows that differ in length, and the encoder: a line for each."""
    shape = ("batch", "tokens", "heads", "head_dim", "n_queries")
    plain = {
        str([row[name] for name in shape]): row["fused_us"]
        for row in of(rows, "kernel_decode")
        if row["scheme"] == "turbo:k8v3"
    }
    yield "| | time | |"
    yield "|---|---|---|"
    for row in of(rows, "kernel_decode_storing"):
        beside = plain[str([row[name] for name in shape])]
        what = f"attention that stores a token of each row first, {row['batch']}"
        yield (
            f"| {what} x {row['tokens'] // 1024}k tokens | {row['fused_us']:.1f} us "
            f"| {beside:.1f} us without |"
        )
    for row in of(rows, "kernel_decode_ragged"):
        bytes_read = row["fused_us"] * row["fused_tb_per_s"]
        yield (
            f"| rows that differ in length, {row['rows']} tokens | {row['fused_us']:.1f} us "
            f"| {row['fused_tb_per_s']:.2f} TB/s; a kernel that only reads as many bytes "
            f"{row['read_us']:.1f} us, {bytes_read / row['read_us']:.2f} TB/s; "
            f"one that does nothing {row['nothing_us']:.1f} us |"
        )
    for row in of(rows, "kernel_encode"):
        what = f"{row['heads']} heads of {row['head_dim']}, `{row['scheme']}`"
        many = row["tokens"] > 1
        n_tokens = f"{row['tokens']:,} tokens" if many else "a token"
        rate = f"{row['encode_tb_per_s']:.2f} TB/s read and written" if many else ""
        yield f"| encode {n_tokens} of {what} | {row['encode_us']:.1f} us | {rate} |"


def calls(rows: Sequence[Row]) -> Iterator[str]:
    """Calls through MLX, the last row of each: times, and ratios to mlx's own attention."""
    cells = {
        (row["batch"], row["tokens"], row["scheme"]): row
        for row in of(rows, "fetch")
        if (row["fetch"], row["dtype"], row["head_dim"]) == ("fused", "bfloat16", 128)
    }
    schemes = "turbo:k8v3", "turbo:k4v3"
    heads = " | ".join(f"`{scheme}`, of bfloat16 | of `affine:8`" for scheme in schemes)
    yield f"| batch | tokens | {heads} |"
    yield "|---" * 6 + "|"
    for batch, tokens in sorted({cell[:2] for cell in cells}):
        line = f"| {batch} | {tokens // 1024}k |"
        for row in (cells[batch, tokens, scheme] for scheme in schemes):
            line += f" {1e3 * row['median_ms']:.0f} us, {row['vs_off']:.2f} |"
            line += f" {row['vs_affine8']:.1f} |"
        yield line


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Write the tables of `docs/accuracy.md` from the recorded rows. Run it after recording.

Usage: python tools/make_accuracy_docs.py

Each table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; all else is
written by hand.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstow.evaluate.law import laws
from kvstow.evaluate.statistics import ratio_interval

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "accuracy.md"
ROWS = ROOT / "benchmarks" / "results" / "quality.jsonl"
Row = dict[str, Any]


def page(text: str, rows: Sequence[Row]) -> str:
    """`text` with every table written again."""
    tables = {"search": search(rows), "laws": rates(rows), "models": models(rows)}
    for name, lines in tables.items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        text = "\n".join([before + begin, *lines, end + after])
    return text


def search(rows: Sequence[Row]) -> Iterator[str]:
    """Mean KL with ``+search`` over that without, paired by text."""
    yield "| model | scheme | ratio | 95% interval |"
    yield "|---|---|---|---|"
    by_arm = {(row["model"], row["arm"]): row for row in rows}
    for (model, arm), row in by_arm.items():
        without = by_arm.get((model, arm.removesuffix("+search")))
        if arm.endswith("+search") and without is not None:
            a, b = (np.array(r["per_text_kl_nats"]) for r in (row, without))
            low, high = ratio_interval(a, b)
            scheme = arm.removeprefix("turbo:").removesuffix("+search")
            ratio = a.mean() / b.mean()
            yield f"| {model} | {scheme} | {ratio:.2f} | {low:.2f} to {high:.2f} |"


def rates(rows: Sequence[Row]) -> Iterator[str]:
    """How many times the KL above that of 8-bit values falls per bit of the values."""
    yield "| model | scheme | value bits | falls per bit | 95% interval |"
    yield "|---|---|---|---|---|"
    for law in laws(rows):
        low, high = law.interval_95
        cells = (law.model, f"`{law.scheme}`", ", ".join(map(str, law.bits)), f"{law.rate:.2f}")
        yield f"| {' | '.join(cells)} | {low:.2f} to {high:.2f} |"


def models(rows: Sequence[Row]) -> Iterator[str]:
    """All arms of each model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        texts = {row["texts"]["n_texts"] for row in mine}
        dims = {str(d) for row in mine for d in row["head_dims"]}
        yield f"### {model}\n"
        yield (
            f"head_dim {' and '.join(sorted(dims))}, n = {', '.join(map(str, texts))} texts, "
            f"perplexity without quantisation {mine[0]['reference_ppl']:.2f}.\n"
        )
        yield "| arm | layers | bits | mean KL | 95% interval | median | top-1 |"
        yield "|---|---|---|---|---|---|---|"
        for row in mine:
            low, high = row["interval_95"]
            yield (
                f"| `{row['arm']}` | {row['layers'][0]} of {row['layers'][1]} "
                f"| {row['bits_per_value']:g} | {row['mean_kl_nats']:.5f} "
                f"| {low:.5f} to {high:.5f} | {row['median_kl_nats']:.5f} "
                f"| {row['top1_agreement']:.1%} |"
            )
        yield ""


def main() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()

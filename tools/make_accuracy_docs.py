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
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def page(text: str, rows: Sequence[Row], of_policies: Sequence[Row]) -> str:
    """`text` with every table written again."""
    tables = {
        "search": search(rows),
        "laws": rates(rows),
        "policies": policies(of_policies),
        "models": models(rows),
    }
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


def policies(rows: Sequence[Row]) -> Iterator[str]:
    """Mean KL under a policy, beside that of the scheme whose bytes it takes."""
    yield "| model | scheme | mean KL | policy | mean KL | ratio | 95% interval |"
    yield "|---|---|---|---|---|---|---|"
    whole = [row for row in rows if row["measure"] == "kl" and "@layer" not in row["arm"]]
    for even, chosen in zip(whole[::2], whole[1::2], strict=True):
        a, b = (np.array(row["per_text_kl_nats"]) for row in (chosen, even))
        low, high = ratio_interval(a, b)
        spelled = chosen["arm"].removeprefix("policy(").removesuffix(")")
        cells = (even["model"], f"`{even['arm']}`", f"{b.mean():.5f}", spelled, f"{a.mean():.5f}")
        yield f"| {' | '.join(cells)} | {a.mean() / b.mean():.2f} | {low:.2f} to {high:.2f} |"


def models(rows: Sequence[Row]) -> Iterator[str]:
    """All arms of each model."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        texts = {row["texts"]["n_texts"] for row in mine}
        dims = {str(dim) for row in mine for dim in row["head_dims"]}
        commits = sorted({row["commit"] for row in mine})
        yield f"### {model}\n"
        yield (
            f"head_dim {' and '.join(sorted(dims))}, n = {', '.join(map(str, texts))} texts, "
            f"perplexity without quantisation {mine[0]['reference_ppl']:.2f}; at "
            f"{', '.join(commits)}.\n"
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


def recorded(name: str) -> list[Row]:
    """The rows of a file of results."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    text = page(PAGE.read_text(encoding="utf-8"), recorded("quality"), recorded("policy"))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

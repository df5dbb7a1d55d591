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


def page(text: str) -> str:
    """`text` with every table written again."""
    rows = recorded("quality")
    tables = {
        "search": search(rows),
        "laws": rates(rows),
        "policies": policies(recorded("policy")),
        "kl on a gpu": other_kl(recorded("h200")),
        "ppl": perplexities(recorded("h200")),
        "needle": needles([*recorded("h200"), *recorded("needle")]),
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
        without = by_arm.get((model, arm.replace("+search", "")))
        if "+search" in arm and without is not None:
            a, b = (np.array(r["per_text_kl_nats"]) for r in (row, without))
            low, high = ratio_interval(a, b)
            scheme = arm.removeprefix("turbo:").replace("+search", "")
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


def other_kl(rows: Sequence[Row]) -> Iterator[str]:
    """KL, with how the prefix was stored."""
    yield "| arm | prefix | texts | mean KL | 95% interval | top-1 |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        if row["measure"] == "kl":
            low, high = row["interval_95"]
            prefix = {"convert": "at once", "append": "by tokens"}[row["window"]["build"]]
            cells = (f"`{row['arm']}`", prefix, row["texts"]["n_texts"])
            figures = (f"{row['mean_kl_nats']:.5f}", f"{low:.5f} to {high:.5f}")
            yield _line(*cells, *figures, f"{row['top1_agreement']:.1%}")


def perplexities(rows: Sequence[Row]) -> Iterator[str]:
    """Perplexity through the cache."""
    yield "| arm | perplexity | change of its logarithm | 95% interval |"
    yield "|---|---|---|---|"
    for row in rows:
        if row["measure"] == "ppl":
            low, high = row["interval_95"]
            change = f"{row['mean_change_nats']:+.4f}"
            yield _line(
                f"`{row['arm']}`", f"{row['ppl']:.3f}", change, f"{low:+.4f} to {high:+.4f}"
            )


def needles(rows: Sequence[Row]) -> Iterator[str]:
    """Facts found."""
    yield "| arm | on a prefix hit | found | of | 95% interval |"
    yield "|---|---|---|---|---|"
    for row in rows:
        if row["measure"] == "needle":
            low, high = row["interval_95"]
            found, n = (sum(cell[key] for cell in row["cells"]) for key in ("found", "n"))
            hit = "yes" if row["window"]["prefix_hit"] else "no"
            yield _line(f"`{row['arm']}`", hit, found, n, f"{low:.0%} to {high:.0%}")


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


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
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Write the table of `docs/reliability.md` from the recorded rows. Run it after recording.

Usage: python tools/make_reliability_docs.py

It stands between ``<!-- begin load -->`` and ``<!-- end load -->``; all else is written by hand.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
ROWS = ROOT / "benchmarks" / "results" / "load.jsonl"
Row = dict[str, Any]


def page(text: str) -> str:
    """`text` with the table written again, from the last row of each model."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    last = {row["model"]: row for row in map(json.loads, lines)}
    before, begin, rest = text.partition("<!-- begin load -->\n")
    _, end, after = rest.partition("<!-- end load -->")
    return "\n".join([before + begin, *table(list(last.values())), end + after])


def table(rows: Sequence[Row]) -> Iterator[str]:
    columns = [dict(figures(row)) for row in rows]
    yield f"| | {' | '.join(row['model'] for row in rows)} |"
    yield "|---" * (1 + len(rows)) + "|"
    for name in columns[0]:
        yield f"| {name} | {' | '.join(column[name] for column in columns)} |"


def figures(row: Row) -> Iterator[tuple[str, str]]:
    """What one run measured, by name."""
    ends: Counter[str] = Counter()
    for kind, n in row["ended"].items():
        ends[kind.rpartition(": ")[2]] += n
    before, after = (n / 1e6 for n in row["mlx_besides_caches_bytes"])
    thirds = [f"{n / 1e6:.0f}" for n in row["resident_bytes_by_third"]]
    hits = row["prefix_hits"]
    yield "minutes", f"{row['minutes']:g}"
    yield "requests", f"{row['requests']}"
    yield "answered", f"{ends['200']}, {row['tokens']} tokens"
    yield "left by their client", f"{ends['gone']}"
    yield "refused as wrong", f"{ends['400'] + ends['404']}"
    yield "told to come again (429)", f"{ends['429']}"
    yield "errors", f"{len(row['errors'])}"
    yield "answers compared with those alone", f"{row['compared']}, of {row['questions']} questions"
    yield "equal", f"{row['equal'] / row['compared']:.1%}"
    yield "largest gap where they part", f"{row['largest_gap_nats']:.2f} nats"
    yield "prefixes from memory, from files", f"{hits['memory']}, {hits['disk']}"
    yield "mlx besides caches, before and after", f"{before:.1f} and {after:.1f} MB"
    yield "resident after each third", f"{', '.join(thirds)} MB"
    yield "reserved and waiting afterwards", f"{row['reserved_bytes']}, {row['waiting']}"
    for name, what in (
        ("first_token_s", "first token"),
        ("whole_s", "answer"),
        ("health_s", "`/health`"),
    ):
        took = row[name]
        yield f"{what}: median, 95%, longest", f"{took['p50']}, {took['p95']}, {took['max']} s"
    yield "exit code after SIGTERM", f"{row['exit_code']}"
    yield "scheme", f"`{row['kv_quant']}`"
    yield "commit", f"`{row['commit']}`"
    yield "machine", f"{row['machine']}, mlx {row['mlx']}, {row['blas']}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

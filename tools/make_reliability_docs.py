"""Write the tables of `docs/reliability.md` from the recorded rows. Run it after recording.

Usage: python tools/make_reliability_docs.py

They stand between ``<!-- begin load -->`` and ``<!-- end load -->``, and the same for
``sanitizer``; all else is written by hand.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def page(text: str) -> str:
    """`text` with the tables written again, from the last row of each model, tool and part."""
    loads = {row["model"]: row for row in recorded("load.jsonl")}
    text = filled(text, "load", table(list(loads.values())))
    checks = {(row["tool"], row["part"]): row for row in recorded("sanitizer.jsonl")}
    return filled(text, "sanitizer", sanitized(list(checks.values())))


def recorded(name: str) -> list[Row]:
    """Rows of a file; none where nothing has been recorded."""
    path = RESULTS / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def filled(text: str, name: str, lines: Iterable[str]) -> str:
    """`text` with these lines between two marks."""
    before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
    _, end, after = rest.partition(f"<!-- end {name} -->")
    return "\n".join([before + begin, *lines, end + after])


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


def sanitized(rows: Sequence[Row]) -> Iterator[str]:
    """The table of compute-sanitizer: tools across, programs down."""
    if not rows:
        yield "This has not been run yet."
        return
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    cells = {(row["tool"], row["part"]): result(row) for row in rows}
    parts = sorted({row["part"] for row in rows} - {"control"}, key=int)
    yield f"| | {' | '.join(tools)} |"
    yield "|---" * (1 + len(tools)) + "|"
    for part in ["control", *parts]:
        outcomes = (cells.get((tool, part), "not run") for tool in tools)
        yield f"| {said_of(part)} | {' | '.join(outcomes)} |"
    yield ""
    told = [row for row in rows if row["gpu"]]  # by a program that ran to its end
    made: dict[str, dict[str, None]] = {}
    for row in told or rows:
        made.setdefault(versions(row), {})[row["part"]] = None
    for about, by in made.items():
        yield f"{', '.join(said_of(part) for part in ('control', *parts) if part in by)}: {about}  "


def said_of(part: str) -> str:
    """What a run is called."""
    return "the kernel with a fault" if part == "control" else f"head_dim {part}"


def result(row: Row) -> str:
    """How one run ended, in a cell."""
    control = row["part"] == "control"
    if row["status"] == "clean" and not control:
        return f"clean: {row['kernels']} kernels, {row['launches']} launches"
    if row["status"] == "timeout":
        return f"**not ended** after {row['seconds']:.0f} s"
    if row["status"] == "found":
        found = f"{row['errors']} errors"
        found += f", {row['warnings']} warnings" if row["warnings"] else ""
        return f"found ({found})" if control else f"**{found}**"
    said = f": {row['said'][0]}" if row["said"] else ""
    return f"**{'not found' if control else row['status']}**{said}".replace("|", "\\|")


def versions(row: Row) -> str:
    """Where a run was made."""
    tool, gpu = row["sanitizer"] or "of unknown version", row["gpu"] or "GPU unknown"
    return f"compute-sanitizer {tool}, {gpu}, commit `{row['commit']}`."


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

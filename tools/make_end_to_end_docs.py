"""Write what `benchmarks/bench_end_to_end.py` has recorded into the docs. Run it after recording.

Usage: python tools/make_end_to_end_docs.py

It writes two figures into docs/figures, and what stands in docs/kernels.md and README.md between
``<!-- begin end to end -->`` and ``<!-- end end to end -->``. The last row of each cell counts;
the figures are of the first model that was recorded.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstow.evaluate.figures.canvas import styled, to_bytes
from kvstow.evaluate.figures.decoding import GB, absence, context, draw_memory, draw_speed

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "end_to_end.jsonl"
FIGURES = ROOT / "docs" / "figures"
BEGIN, END = "<!-- begin end to end -->\n", "<!-- end end to end -->"
CELL = ("model", "dtype", "device", "longest", "batch", "tokens", "scheme")
MODELS = {
    "llama8b": "A model of Llama 3.1 8B's shape",
    "gemma4b": "A model of the shape of Gemma 3 4B, of whose layers five in six see 1024 tokens,",
    "smollm2.gguf": "SmolLM2-135M, with its own weights,",
}
PICTURES = {
    "decode_speed.svg": (draw_speed, "Decode speed against context, relative to no scheme"),
    "decode_memory.svg": (draw_memory, "Memory while decoding against context"),
}
Row = dict[str, Any]


def recorded() -> list[Row]:
    """The last row of each cell; none if nothing was recorded."""
    text = ROWS.read_text(encoding="utf-8") if ROWS.exists() else ""
    return distinct(map(json.loads, text.splitlines()))


def distinct(rows: Iterable[Row]) -> list[Row]:
    """The last row of each cell; the longest context is one, however long it is."""

    def cell(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in CELL if name != "tokens" or not row["longest"])

    return list({cell(row): row for row in rows}.values())


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one model on one device each."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["dtype"], row["device"]), []).append(row)
    return list(found.values())


def page(text: str, lines: Iterable[str]) -> str:
    """`text` with `lines` in the place of those between the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "".join(f"{line}\n" for line in lines) + end + after


def figures(rows: Sequence[Row]) -> dict[str, bytes]:
    """The files of docs/figures."""
    (shown, *_) = groups(rows)
    cells = [row for row in shown if not row["longest"]]
    with styled():
        return {
            name: to_bytes(draw(cells, [about(shown)]), ".svg")
            for name, (draw, _) in PICTURES.items()
        }


def about(rows: Sequence[Row]) -> str:
    """What was measured, and by what."""
    row = rows[0]
    commits = " and ".join(dict.fromkeys(row["commit"] or "an unknown commit" for row in rows))
    model = MODELS.get(row["model"], row["model"])
    return f"{model} in {row['dtype']}, on {row['device']} with mlx {row['mlx']}, at {commits}."


def readme(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        (shown, *_) = groups(rows)
        yield about(shown) + " More in [end to end](docs/kernels.md#end-to-end)."
        yield from pictures("docs/figures")


def pictures(folder: str) -> Iterator[str]:
    for name, (_, says) in PICTURES.items():
        yield from ("", f"![{says}]({folder}/{name})")


def section(rows: Sequence[Row]) -> Iterator[str]:
    """What docs/kernels.md says of whole models."""
    if not rows:
        yield "Not recorded yet: `benchmarks/bench_end_to_end.py` measures it."
        return
    yield (
        "Caches hold noise, and all rows of a batch are as long as each other "
        "([end_to_end.jsonl](../benchmarks/results/end_to_end.jsonl))."
    )
    yield from pictures("figures")
    for group in groups(rows):
        yield ""
        yield from of_model(group)


def of_model(rows: Sequence[Row]) -> Iterator[str]:
    cells = [row for row in rows if not row["longest"]]
    yield about(rows)
    yield from (
        "",
        "Tokens per second, all rows of a batch together, medians; in brackets, times `off`, the",
        "median of the ratios of rounds in which both took a turn:",
        "",
    )
    yield from table(cells, speed)
    yield from (
        "",
        "Peak memory while decoding, weights included; in brackets, the KV cache; GB:",
        "",
    )
    yield from table(cells, memory)
    yield ""
    for remarks in (limits, failures, against_affine, longest, calls, commands):
        yield from (f"- {remark}" for remark in remarks(rows))


def table(rows: Sequence[Row], say: Callable[[Row], str]) -> Iterator[str]:
    """A line for each cell, a column for each scheme."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    cells: dict[tuple[int, int], dict[str, str]] = {}
    for row in rows:
        said = absence(row) if row["refused"] else say(row)
        cells.setdefault((row["batch"], row["tokens"]), {})[row["scheme"]] = said
    yield f"| batch | tokens | {' | '.join(f'`{scheme}`' for scheme in schemes)} |"
    yield "|---" * (2 + len(schemes)) + "|"
    for (batch, tokens), found in sorted(cells.items()):
        columns = [str(batch), context(tokens), *(found.get(scheme, "") for scheme in schemes)]
        yield f"| {' | '.join(columns)} |"


def speed(row: Row) -> str:
    ratio = "" if row["vs_off"] is None or row["scheme"] == "off" else f" ({row['vs_off']:.2f})"
    return f"{row['decode_tokens_per_s']:.1f}{ratio}"


def memory(row: Row) -> str:
    return f"{row['peak_memory_bytes'] / GB:.1f} ({row['kv_bytes'] / GB:.2f})"


def limits(rows: Sequence[Row]) -> Iterator[str]:
    said = " or ".join(f"{n / GB:.1f}" for n in sorted({row["memory_limit_bytes"] for row in rows}))
    yield f"A cell fits if weights, the cache and growing it take an estimated {said} GB at most."


def failures(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[str, set[str]] = {}
    for row in rows:
        if row["refused"] and row["fits"]:
            reasons.setdefault(row["refused"], set()).add(f"`{row['scheme']}`")
    for why, schemes in reasons.items():
        yield f"{', '.join(sorted(schemes))} failed: {why}"


def against_affine(rows: Sequence[Row]) -> Iterator[str]:
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["scheme"].startswith("turbo") and row["vs_affine8"] is not None:
            ratios.setdefault(row["scheme"], []).append(row["vs_affine8"])
    for scheme, found in ratios.items():
        yield f"`{scheme}` is {min(found):.2f} to {max(found):.2f} times as fast as `affine:8`."


def longest(rows: Sequence[Row]) -> Iterator[str]:
    found = [row for row in rows if row["longest"]]
    off = next((row["tokens"] for row in found if row["scheme"] == "off"), None)
    for row in found:
        said = row["refused"] or f"{row['decode_tokens_per_s']:.1f} tokens/s"
        times = f", {row['tokens'] / off:.2f} times `off`" if off and row["scheme"] != "off" else ""
        where = f"{row['tokens']} tokens in each of {row['batch']} rows{times}"
        yield f"The longest context that fits under `{row['scheme']}`: {where}; {said}."


def calls(rows: Sequence[Row]) -> Iterator[str]:
    found: Counter[str] = Counter()
    for row in rows:
        found.update(row.get("attention_calls", {}))
    if found:
        said = "; ".join(f"{what}: {n}" for what, n in sorted(found.items()))
        yield f"What took the calls of attention over packed tokens: {said}."


def commands(rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows))


def main() -> None:
    rows = recorded()
    for path, lines in ((ROOT / "docs" / "kernels.md", section), (ROOT / "README.md", readme)):
        path.write_text(page(path.read_text(encoding="utf-8"), lines(rows)), encoding="utf-8")
    for name, file in (figures(rows) if rows else {}).items():
        (FIGURES / name).write_bytes(file)


if __name__ == "__main__":
    main()

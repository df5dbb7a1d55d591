"""Speed and memory of decoding against context, from rows of benchmarks/bench_end_to_end.py."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvstow.evaluate.figures.canvas import GREY, colour_of, legend, new_figure, note
from kvstow.evaluate.rows import Row

GB = 1e9
THIN: dict[str, Any] = {"color": GREY, "lw": 0.8, "ls": "--"}
SPEED_SAYS = (
    "Ratios to no scheme in the same run. A cross: the scheme does not fit, or failed. "
    "Grey: off does not fit, or failed, so that there is no ratio; schemes without a cross ran."
)
MEMORY_SAYS = (
    "The peak while decoding, weights included. Hollow: does not fit, as was estimated before "
    "anything was tried. Dashed: what there is."
)


def draw_speed(rows: Sequence[Row], about: Sequence[str]) -> Figure:
    """Decode speed over that of ``off``; where that is not known, a band says why.

    Args:
        rows: Of one model on one device, each cell once.
        about: What was measured and where, a sentence each.
    """
    return _panels(rows, _speed, "decode speed, times that of off", [*about, SPEED_SAYS])


def draw_memory(rows: Sequence[Row], about: Sequence[str]) -> Figure:
    """Peak memory, with what the device has; see `draw_speed`."""
    return _panels(rows, _memory, "memory, GB", [*about, MEMORY_SAYS])


def digest(rows: Sequence[Row]) -> str:
    """The id, in its file, of a figure of `rows`."""
    text = json.dumps(list(rows), sort_keys=True)
    return "rows-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def context(tokens: int) -> str:
    """``"32k"``."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def absence(row: Row) -> str:
    """Why a refused cell has no figures, in a word or three."""
    return "failed" if row["fits"] else "does not fit"


def _panels(
    rows: Sequence[Row],
    draw: Callable[[Axes, Sequence[Row], dict[str, str]], None],
    label: str,
    says: Sequence[str],
) -> Figure:
    """A panel for each batch size, a colour for each scheme."""
    batches = sorted({row["batch"] for row in rows})
    colours = {s: colour_of(i) for i, s in enumerate(dict.fromkeys(row["scheme"] for row in rows))}
    figure = new_figure(9, 4)
    figure.set_gid(digest(rows))
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        of_batch = [row for row in rows if row["batch"] == batch]
        contexts = sorted({row["tokens"] for row in of_batch})
        axes.set(title=f"batch {batch}", xlabel="tokens of context")
        axes.set_xticks(range(len(contexts)), map(context, contexts))
        axes.set_xlim(-0.5, len(contexts) - 0.5)
        axes.grid(axis="y", alpha=0.3)
        placed = [{**row, "at": contexts.index(row["tokens"])} for row in of_batch]
        draw(axes, sorted(placed, key=lambda row: row["at"]), colours)
    panels[0].set(ylabel=label)
    panels[0].set_ylim(bottom=0)
    legend(figure, [(s, {"color": c, "marker": "o", "markersize": 4}) for s, c in colours.items()])
    note(figure, says)
    return figure


def _speed(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    foot = axes.get_xaxis_transform()  # heights from 0 to 1 whatever the ratios are
    axes.axhline(1, **THIN)
    for i, (scheme, colour) in enumerate(colours.items()):
        mine = [row for row in rows if row["scheme"] == scheme]
        found = [(row["at"], row["vs_off"]) for row in mine if row["vs_off"] is not None]
        axes.plot(*_columns(found), color=colour, marker="o", markersize=4, lw=1.2)
        for row in (row for row in mine if row["refused"]):
            if scheme == "off":
                axes.axvspan(row["at"] - 0.4, row["at"] + 0.4, color=GREY, alpha=0.15, lw=0)
                middle: dict[str, Any] = {
                    "rotation": 90,
                    "ha": "center",
                    "va": "center",
                    "color": GREY,
                }
                axes.text(row["at"], 0.5, f"off {absence(row)}", transform=foot, **middle)
            else:
                aside = 0.8 * ((i + 0.5) / len(colours) - 0.5)
                cross: dict[str, Any] = {"marker": "x", "markersize": 5, "ls": "", "color": colour}
                axes.plot(row["at"] + aside, 0.03, transform=foot, **cross)


def _memory(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    axes.axhline(max(row["memory_limit_bytes"] for row in rows) / GB, **THIN)
    for scheme, colour in colours.items():
        mine = [row for row in rows if row["scheme"] == scheme]
        run = [(row["at"], row["peak_memory_bytes"] / GB) for row in mine if not row["refused"]]
        not_run = [(row["at"], row["needed_bytes"] / GB) for row in mine if not row["fits"]]
        axes.plot(*_columns(sorted([*run, *not_run])), color=colour, lw=1.2)
        axes.plot(*_columns(run), color=colour, marker="o", markersize=4, ls="")
        axes.plot(*_columns(not_run), color=colour, marker="o", markersize=4, ls="", mfc="white")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]

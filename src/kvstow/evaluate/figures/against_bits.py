"""Mean KL of every arm against its bits per value, all metadata counted."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvstow.evaluate.arms import Arm
from kvstow.evaluate.figures.canvas import (
    GREY,
    caption,
    clean,
    colour_of,
    legend,
    logarithmic,
    new_figure,
)
from kvstow.evaluate.figures.labels import label_points
from kvstow.evaluate.law import widths
from kvstow.evaluate.rows import Row
from kvstow.policy import Policy
from kvstow.scheme import Affine

MARKERS = {"turbo": "o", "affine": "s", "paper": "^", "policy": "D"}
NOISE_DASHES = {"bfloat16": "--", "float16": ":"}
SAYS = "Mean over texts; the bars are 95% intervals, a bootstrap over texts."
NAMES = " Names stand beside the model with the largest KL."


def draw(rows: Sequence[Row]) -> Figure:
    """One colour per model, one marker per family; arms that differ in one width are joined."""
    figure = new_figure(8.5, 6)
    axes = figure.add_subplot()
    arms = [Arm.parse(row["arm"]) for row in rows]
    models = list(dict.fromkeys(row["model"] for row in rows))
    colours = {model: colour_of(i) for i, model in enumerate(models)}
    stored = [(row, arm) for row, arm in zip(rows, arms, strict=True) if arm.dtype is None]
    noise = [(row, arm) for row, arm in zip(rows, arms, strict=True) if arm.dtype is not None]
    axes.set(xlabel="bits per value, all metadata counted")
    for row, arm in noise:
        dashes = NOISE_DASHES[str(arm.dtype)]
        axes.axhline(row["mean_kl_nats"], ls=dashes, lw=0.8, color=colours[row["model"]])
    _join(axes, stored, colours)
    for row, arm in stored:
        error_bar(axes, row, row["bits_per_value"], colours[row["model"]], _look(arm))
    lows, highs = zip(*map(span, rows), strict=True)
    logarithmic(axes, "mean KL against the unquantised model, nats", min(lows), max(highs))
    entries: list[tuple[str, dict[str, Any]]] = [
        (m, {"color": colours[m], "lw": 3}) for m in models
    ]
    families = dict.fromkeys(_family(arm) for _, arm in stored)
    entries += [(f, {"marker": MARKERS[f], "ls": "", "color": GREY}) for f in families]
    if any(arm.part != "both" for _, arm in stored):
        hollow = {"marker": "o", "ls": "", "mfc": "white", "color": GREY}
        entries.append(("only keys or values", hollow))
    for dtype in dict.fromkeys(str(arm.dtype) for _, arm in noise):
        look = {"ls": NOISE_DASHES[dtype], "lw": 0.8, "color": GREY}
        entries.append((f"noise of {dtype} itself", look))
    legend(figure, entries)
    caption(figure, rows, SAYS + (NAMES if len(models) > 1 else ""))
    points = {(arm.label, row["model"]): _place(row) for row, arm in stored}
    named = {
        arm: max((p for (a, _), p in points.items() if a == arm), key=lambda p: p[1])
        for arm, _ in points
    }
    label_points(axes, [(*place, clean(arm)) for arm, place in named.items()], [*points.values()])
    return figure


def error_bar(axes: Axes, row: Row, x: float, colour: str, look: dict[str, Any]) -> None:
    """The mean KL of a row with its interval."""
    mean, (low, high) = row["mean_kl_nats"], row["interval_95"]
    bars = [[max(mean - low, 0)], [max(high - mean, 0)]]
    axes.errorbar(
        x, mean, yerr=bars, color=colour, lw=0.9, capsize=2, markersize=5.5, zorder=3, **look
    )


def span(row: Row) -> tuple[float, float]:
    """From where to where a logarithmic axis must reach for a row."""
    mean, (low, high) = row["mean_kl_nats"], row["interval_95"]
    return max(low, mean / 10), max(high, mean)


def _place(row: Row) -> tuple[float, float]:
    return row["bits_per_value"], row["mean_kl_nats"]


def _join(axes: Axes, stored: Sequence[tuple[Row, Arm]], colours: dict[str, str]) -> None:
    series: dict[Any, list[Row]] = {}
    for row, arm in stored:
        kind, bits = widths(arm)
        series.setdefault((row["model"], kind, bits[:-1]), []).append(row)
    for (model, *_), rows in series.items():
        places = sorted(map(_place, rows))
        axes.plot(*zip(*places, strict=True), color=colours[model], lw=0.8, alpha=0.5)


def _family(arm: Arm) -> str:
    if isinstance(arm.scheme, Policy):
        return "policy"
    if arm.paper:
        return "paper"
    return "affine" if isinstance(arm.scheme, Affine) else "turbo"


def _look(arm: Arm) -> dict[str, Any]:
    hollow = {} if arm.part == "both" else {"mfc": "white"}
    return {"marker": MARKERS[_family(arm)], **hollow}

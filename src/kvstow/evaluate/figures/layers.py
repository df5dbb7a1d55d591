"""What it costs to quantise one layer alone: mean KL by layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvstow.evaluate.arms import Arm
from kvstow.evaluate.figures.against_bits import error_bar, span
from kvstow.evaluate.figures.canvas import (
    caption,
    clean,
    colour_of,
    dash_of,
    legend,
    logarithmic,
    new_figure,
)
from kvstow.evaluate.rows import Row

MARKERS = "os^Dv"
SAYS = (
    "Only the cache with this index is quantised; the bars are 95% intervals, a bootstrap over "
    "texts. Lines join layers that were measured, and break at one that was not."
)


def draw(rows: Sequence[Row]) -> Figure:
    """One panel per model, one line per scheme."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    schemes = list(dict.fromkeys(_scheme(row) for row in rows))
    looks = {
        scheme: {"color": colour_of(i), "ls": dash_of(i), "marker": MARKERS[i % len(MARKERS)]}
        for i, scheme in enumerate(schemes)
    }
    figure = new_figure(8.5, 1.3 + 3.2 * len(models))
    panels = figure.subplots(len(models), squeeze=False)[:, 0]
    for model, axes in zip(models, panels, strict=True):
        _panel(axes, [row for row in rows if row["model"] == model], looks)
        axes.set_title(clean(model), loc="left")
    panels[-1].set(xlabel="layer, by its index among the model's caches")
    figure.supylabel("mean KL against the unquantised model, nats", fontsize=9)
    legend(figure, [*looks.items()])
    caption(figure, rows, SAYS)
    return figure


def _panel(axes: Axes, rows: Sequence[Row], looks: dict[str, dict[str, Any]]) -> None:
    for scheme, look in looks.items():
        of_scheme = {_layer(row): row for row in rows if _scheme(row) == scheme}
        for layer, row in of_scheme.items():
            marker = {"marker": look["marker"], "ls": ""}
            error_bar(axes, row, layer, look["color"], marker)
        # A layer that was not measured has no height: the line breaks there.
        every = range(min(of_scheme, default=0), max(of_scheme, default=-1) + 1)
        heights = [of_scheme[i]["mean_kl_nats"] if i in of_scheme else float("nan") for i in every]
        axes.plot(every, heights, color=look["color"], ls=look["ls"], lw=1)
    lows, highs = zip(*map(span, rows), strict=True)
    logarithmic(axes, "", min(lows), max(highs))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _scheme(row: Row) -> str:
    return str(replace(Arm.parse(row["arm"]), layer=None))


def _layer(row: Row) -> int:
    layer = Arm.parse(row["arm"]).layer
    return -1 if layer is None else layer

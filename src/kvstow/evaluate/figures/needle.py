"""Planted facts found again, by depth and length, beside the unquantised model."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvstow.evaluate.arms import Arm
from kvstow.evaluate.figures.canvas import caption, clean, new_figure
from kvstow.evaluate.rows import Row
from kvstow.evaluate.statistics import found_interval

COLUMNS = 3
DARK = 0.5  # below it letters are white
LETTERS: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
# Steps of 5%: matplotlib draws the bar of a finer scale as an image.
SCALE = colormaps["cividis"].resampled(20)
COLOURS: dict[str, Any] = {"cmap": SCALE, "vmin": 0, "vmax": 1, "edgecolors": "white", "lw": 0.5}
SAYS = (
    "Above each panel: found relative to the unquantised model, and found of all prompts with its "
    "95% interval. In each cell: found by the arm / found by the unquantised model, of {}. The "
    "colour is their ratio; a cell is white where the unquantised model finds nothing."
)


def draw(rows: Sequence[Row]) -> Figure:
    """One panel per model and arm."""
    columns = min(COLUMNS, math.ceil(math.sqrt(len(rows))))
    lines = -(-len(rows) // columns)
    lengths = sorted({cell["length"] for row in rows for cell in row["cells"]})
    depths = sorted({cell["depth"] for row in rows for cell in row["cells"]})
    width = max(0.55 * len(lengths) * columns + 1.8, 4 + 1.4 * columns)
    figure = new_figure(width, (0.32 * len(depths) + 1) * lines + 1.3)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    n_models = len({row["model"] for row in rows})
    for row, axes in zip(rows, panels.flat, strict=False):
        mesh = _panel(axes, row, lengths, depths)
        model = f"{clean(row['model'])}\n" if n_models > 1 else ""
        low, high = found_interval(row["cells"])
        found = f"found {row['score']:.0%} ({low:.0%} to {high:.0%})"
        title = f"{model}{Arm.parse(row['arm']).label}  {row['relative']:.0%}\n{found}"
        axes.set_title(title, loc="left", fontsize=8)
    for axes in panels.flat[len(rows) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("depth")
    for axes in panels.flat[len(rows) - columns : len(rows)]:  # those with none below
        axes.set_xlabel("length, tokens")
        axes.tick_params(labelbottom=True)
    figure.colorbar(mesh, ax=panels, label="found, relative to off", shrink=0.8)
    models = "" if n_models > 1 else f"{rows[0]['model']}. "
    n = sorted({cell["n"] for row in rows for cell in row["cells"]})
    caption(figure, rows, models + SAYS.format(n[0] if len(n) == 1 else f"{n[0]} to {n[-1]}"))
    return figure


def _panel(axes: Axes, row: Row, lengths: Sequence[int], depths: Sequence[float]) -> Any:
    cells = {(cell["depth"], cell["length"]): cell for cell in row["cells"]}
    ratios = np.full((len(depths), len(lengths)), np.nan)
    for i, depth in enumerate(depths):
        for j, length in enumerate(lengths):
            if (cell := cells.get((depth, length))) is None:
                continue
            if cell["found_off"]:
                ratios[i, j] = cell["found"] / cell["found_off"]
            colour = "white" if ratios[i, j] < DARK else "black"
            axes.text(j, i, f"{cell['found']}/{cell['found_off']}", color=colour, **LETTERS)
    at = np.arange(len(lengths)), np.arange(len(depths))
    mesh = axes.pcolormesh(*at, ratios, shading="nearest", **COLOURS)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_ylim(len(depths) - 0.5, -0.5)  # the beginning of a text is at the top
    axes.tick_params(length=0, labelsize=7)
    return mesh

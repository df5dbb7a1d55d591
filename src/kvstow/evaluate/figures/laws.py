"""KL against the bits of values, with the law that it follows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.figures.against_bits import error_bar, span
from kvstow.evaluate.figures.canvas import (
    GREY,
    caption,
    colour_of,
    legend,
    logarithmic,
    new_figure,
)
from kvstow.evaluate.law import Law, laws
from kvstow.evaluate.rows import Row
from kvstow.scheme import Turbo

MARKERS = "os^Dv"
SAYS = (
    "Points: mean KL, with 95% intervals, a bootstrap over texts. Lines: floor + c rate^-bits, "
    "where the floor is the KL at 8 bits of value and the rate has its 95% interval. "
    "Dashed: the same with a rate of 4."
)


def draw(rows: Sequence[Row]) -> Figure:
    """One colour per model and kind of keys.

    Raises:
        EvaluationError: If no model has arms for a fit.
    """
    fitted = laws(rows)
    if not fitted:
        raise EvaluationError(
            "a law needs turbo:k8v<bits> of one model with at least two widths below 8 bits"
        )
    figure = new_figure(8.5, 5.5)
    axes = figure.add_subplot()
    entries: list[tuple[str, dict[str, Any]]] = []
    for i, law in enumerate(fitted):
        look = {"color": colour_of(i), "marker": MARKERS[i % len(MARKERS)]}
        for row in law.rows:
            error_bar(axes, row, _bits(row), look["color"], {"marker": look["marker"]})
        x = np.linspace(law.bits[0], max(map(_bits, law.rows)), 100)
        axes.plot(x, law.at(x), color=look["color"], lw=1.2)
        axes.plot(x, law.theory_at(x), color=look["color"], lw=0.8, ls="--")
        entries.append((describe(law), look))
    drawn = [row for law in fitted for row in law.rows]
    lows, highs = zip(*map(span, drawn), strict=True)
    logarithmic(axes, "mean KL against the unquantised model, nats", min(lows), max(highs))
    axes.set(xlabel="bits of a value's code, without metadata")
    axes.set_xticks(sorted(set(map(_bits, drawn))))
    legend(figure, [*entries, ("4 times per bit", {"ls": "--", "lw": 0.8, "color": GREY})])
    caption(figure, drawn, SAYS)
    return figure


def describe(law: Law) -> str:
    """A law in one line."""
    low, high = law.interval_95
    return (
        f"{law.model} {law.scheme}: falls {law.rate:.2f} times per bit ({low:.2f} to {high:.2f}), "
        f"floor {law.floor_nats:.2g}" + ("" if law.floor_nats else ", as 8 bits were not measured")
    )


def _bits(row: Row) -> int:
    scheme = Arm.parse(row["arm"]).scheme
    return scheme.value_bits if isinstance(scheme, Turbo) else 0

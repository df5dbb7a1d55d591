"""What all figures share: fonts, colours, captions, and files whose bytes are reproducible."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvstow.evaluate.rows import Row
from kvstow.evaluate.selection import about, runs

# Okabe and Ito's, told apart without red or green vision; their yellow is too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")  # once the colours are used up
GREY = "#767676"
CAPTION_COLUMNS = 19  # characters per inch of a figure's width
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvstow",
    "svg.fonttype": "none",
    "font.size": 9,
    "text.parse_math": False,  # a model may be called anything
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}
# No date, and no version of what drew it.
METADATA: dict[str, dict[str, Any]] = {
    ".svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    ".png": {"Software": None},
    ".pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
}
SUFFIXES = tuple(METADATA)


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in one style, whatever the user's own settings are."""
    with rc_context(), warnings.catch_warnings():
        # A name in a script that matplotlib's own font lacks; browsers have another.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        rcdefaults()
        rcParams.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def to_bytes(figure: Figure, suffix: str) -> bytes:
    """The file of a figure, by one of `SUFFIXES`; the same rows make the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format=suffix[1:], metadata=METADATA[suffix])
    return file.getvalue()


def clean(text: str) -> str:
    """A name from a row as a figure can show it: one line, nothing that does not print."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def colour_of(index: int) -> str:
    """The colour of the `index`-th thing that is told apart."""
    return COLOURS[index % len(COLOURS)]


def dash_of(index: int) -> str:
    """Its line."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def legend(figure: Figure, entries: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """One legend above the axes; an entry is its label and the look of its line."""
    handles = [Line2D([], [], label=clean(label), **look) for label, look in entries]
    widest = max(len(label) for label, _ in entries)
    columns = max(1, min(len(entries), int(figure.get_figwidth() * 14 // (widest + 6))))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)


def caption(figure: Figure, rows: Sequence[Row], more: str) -> None:
    """Below the axes: the setting of the rows, what is drawn, and what measured it."""
    note(figure, [about(rows[0]), more, "Measured by " + "; ".join(runs(rows)) + "."])


def note(figure: Figure, lines: Sequence[str]) -> None:
    """Lines below the axes, wrapped to the width of the figure."""
    columns = int(figure.get_figwidth() * CAPTION_COLUMNS)
    wrapped = [part for line in lines for part in textwrap.wrap(clean(line), columns)]
    left = {"x": 0.01, "ha": "left", "fontsize": 7, "color": GREY}
    figure.supxlabel("\n".join(wrapped), **left)


def logarithmic(axes: Axes, label: str, low: float, high: float) -> None:
    """A vertical axis of powers of ten from below `low` to above `high`, in plain numbers."""
    low, high = low / 1.5, high * 1.5
    subs = (1.0,) if math.log10(high / low) > 2 else (1.0, 2.0, 5.0)
    axes.set(yscale="log", ylabel=label, ylim=(low, high))
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", alpha=0.3)

"""One figure of rows of results; it needs the extra ``eval``, and no model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvstow.errors import EvaluationError
from kvstow.evaluate.figures import against_bits, laws, layers, needle
from kvstow.evaluate.figures.canvas import SUFFIXES, styled, to_bytes
from kvstow.evaluate.rows import Row
from kvstow.evaluate.selection import check_together, distinct, of_kind

DRAW: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "kl": against_bits.draw,
    "layers": layers.draw,
    "needle": needle.draw,
    "law": laws.draw,
}
NEEDS = {
    "kl": "kvstow eval kl with an arm beside off",
    "layers": "kvstow eval kl with arms such as turbo:k8v3@layer0",
    "needle": "kvstow eval needle",
    "law": "kvstow eval kl with arms such as turbo:k8v2 and turbo:k8v3",
}


def plot(rows: Sequence[Row], kind: str, path: Path) -> None:
    """Write the figure of `rows`; rows of other kinds are left out.

    Args:
        rows: Of one or more files.
        kind: One of `kvstow.evaluate.selection.KINDS`.
        path: A file; its suffix, one of `SUFFIXES`, says which kind.

    Raises:
        EvaluationError: If no row is of this kind, or those that are do not belong together.
        OSError: If the file cannot be written.
    """
    path.write_bytes(render(rows, kind, path.suffix.lower()))


def render(rows: Sequence[Row], kind: str, suffix: str) -> bytes:
    """The file that `plot` writes.

    Raises:
        EvaluationError: As `plot`, or for another suffix.
    """
    if suffix not in SUFFIXES:
        raise EvaluationError(f"a figure is one of {', '.join(SUFFIXES)}, got {suffix!r}")
    chosen = of_kind(distinct(rows), kind)
    if not chosen:
        measures = ", ".join(dict.fromkeys(row["measure"] for row in rows))
        raise EvaluationError(
            f"no row is for a figure of kind {kind!r}: expected rows of {NEEDS[kind]}; "
            f"got {len(rows)} of {measures}"
        )
    check_together(chosen)
    with styled():
        return to_bytes(DRAW[kind](chosen), suffix)

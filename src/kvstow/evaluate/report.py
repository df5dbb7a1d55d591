"""One self-contained HTML file of rows of results: tables, figures, and what measured them.

It holds no script, asks for nothing from elsewhere, and takes every figure from the
rows. It needs the extra ``eval``, and no model.
"""

import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvstow.evaluate import report_tables as tables
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.figures.laws import describe
from kvstow.evaluate.law import laws, violations
from kvstow.evaluate.plot import render
from kvstow.evaluate.report_tables import Table
from kvstow.evaluate.rows import Row
from kvstow.evaluate.selection import about, distinct, of_kind, settings

TITLES = {
    "kl": "KL of the next token",
    "ppl": "Perplexity through the quantised cache",
    "needle": "Facts found again",
    "profile": "Keys and values of each layer",
}
FIGURES = {
    "kl": "Mean KL against bits per value",
    "law": "Mean KL against the bits of values",
    "layers": "Mean KL of each layer quantised alone",
    "needle": "Facts found, by depth and length",
}
ORDERED = "In every pair of arms that differ in one width, more bits have the smaller KL."
_TAG = re.compile(r"<[^>]*>")
_IDS = re.compile(r'(\bid="|url\(#|href="#)')


class Named(NamedTuple):
    """A table or figure under its name."""

    name: str
    content: Table | Markup
    folded: bool = False


class Section(NamedTuple):
    """One setting of one measure."""

    title: str
    setting: str
    notes: list[str]
    tables: list[Named]
    figures: list[Named]


def report(rows: Sequence[Row]) -> str:
    """The HTML of `rows`; measures without a row have no section.

    Raises:
        EvaluationError: If rows contradict each other, or one cannot be shown.
    """
    rows = distinct(rows)
    sections: list[Section] = []
    for measure, title in TITLES.items():
        for setting in settings([row for row in rows if row["measure"] == measure]):
            sections.append(_section(measure, title, setting, len(sections)))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("kvstow.evaluate") / "report.html"
    template = environment.from_string(source.read_text(encoding="utf-8"))
    return template.render(
        models=list(dict.fromkeys(row["model"] for row in rows)),
        measured=tables.measured(rows),
        provenance=tables.provenance(rows),
        sections=sections,
    )


def write_report(rows: Sequence[Row], path: Path) -> None:
    """Write `report` of `rows`, whole or not at all.

    Raises:
        EvaluationError: As `report`.
        OSError: If the file cannot be written.
    """
    path.write_text(report(rows), encoding="utf-8", errors="replace")


def _section(measure: str, title: str, rows: list[Row], index: int) -> Section:
    models = dict.fromkeys(row["model"] for row in rows)
    named = [
        table
        for model in models
        for table in _TABLES[measure](model, [row for row in rows if row["model"] == model])
    ]
    figures = [
        Named(caption, _inline(render(rows, kind, ".svg").decode(), f"s{index}-{kind}", caption))
        for kind, caption in FIGURES.items()
        if of_kind([row for row in rows if row["measure"] in ("kl", "needle")], kind)
        and (kind != "law" or laws(rows))
    ]
    return Section(title, about(rows[0]), _notes(measure, rows), named, figures)


def _notes(measure: str, rows: Sequence[Row]) -> list[str]:
    if measure == "profile":
        return list(map(_hardness, rows))
    notes = tables.kept(rows)
    if measure != "kl":
        return notes
    whole = [row for row in rows if Arm.parse(row["arm"]).layer is None]
    notes += [f"{describe(law)}; 3.4 to 4 times is expected of values alone." for law in laws(rows)]
    broken = [f"Not in order: {violation}." for violation in violations(whole)]
    return notes + (broken or [ORDERED])


def _hardness(row: Row) -> str:
    hard = "hard" if row.get("hard_keys") else "not hard"
    threshold = tables.figure(row.get("threshold"))
    hardness = tables.figure(row["hardness"])
    return f"{row['model']}: keys are {hard} to quantise: {hardness}, threshold {threshold}"


def _kl_tables(model: str, rows: list[Row]) -> list[Named]:
    ppl = tables.figure(float(rows[0]["reference_ppl"]))
    layers = [row for row in rows if Arm.parse(row["arm"]).layer is not None]
    whole = [row for row in rows if Arm.parse(row["arm"]).layer is None]
    named = [Named(f"{model}, unquantised perplexity {ppl}", tables.kl(whole))] if whole else []
    if layers:
        named.append(Named(f"{model}, one layer at a time", tables.kl(layers), folded=True))
    return named


_TABLES: dict[str, Callable[[str, list[Row]], list[Named]]] = {
    "kl": _kl_tables,
    "ppl": lambda model, rows: [Named(model, tables.ppl(rows))],
    "needle": lambda model, rows: [Named(model, tables.needle(rows))],
    "profile": lambda model, rows: [Named(model, tables.profile(row)) for row in rows],
}


def _inline(svg: str, prefix: str, caption: str) -> Markup:
    """An SVG as part of a page: its names are its own, and it says what it is."""
    body = svg[svg.index("<svg") :]
    body = _TAG.sub(lambda tag: _IDS.sub(rf"\g<1>{prefix}-", tag[0]), body)
    return Markup(body.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1))

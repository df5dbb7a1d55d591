"""``kvstow eval needle``: whether a fact planted in a long text is still found."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from kvstow.cli import params as common
from kvstow.cli.console import table_console
from kvstow.cli.eval import params
from kvstow.cli.eval.names import caption, label
from kvstow.cli.eval.run import Bench, bench, chosen_texts, row_shower
from kvstow.cli.progress import Step
from kvstow.cli.refuse import check_context
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import Row
from kvstow.evaluate.statistics import found_interval
from kvstow.evaluate.texts import Text
from kvstow.models import read_config
from kvstow.require import require

SOURCES = ("moby-dick",)
DEFAULT_ARMS = ("off", "affine:8", "affine:4", "turbo:k8v4", "turbo:k8v3")


@click.command()
@common.model
@params.arms(DEFAULT_ARMS)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=64),
    multiple=True,
    default=(512, 1024),
    show_default=True,
    help="Tokens of the whole prompt; may be repeated.",
)
@click.option(
    "--depth",
    "depths",
    type=common.Finite(0, 1),
    multiple=True,
    help="Where in the text the fact is, 0 the beginning; may be repeated.  [default: --depths]",
)
@click.option(
    "--depths",
    "n_depths",
    type=click.IntRange(min=1),
    help="So many depths, evenly from 0 to 1.  [default: 5]",
)
@click.option(
    "--per-cell",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Facts for each length and depth.",
)
@click.option(
    "--prefix-hit/--no-prefix-hit",
    default=False,
    show_default=True,
    help="Read the text once, copy its caches, and append the question to the copies.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens of a prompt that are read at a time; all but the first attend to what is stored.",
)
@params.text_files
@params.dtype
@params.name
@params.output
@common.as_json
def needle(
    *,
    model: str,
    arms: tuple[Arm, ...],
    lengths: tuple[int, ...],
    depths: tuple[float, ...],
    n_depths: int | None,
    per_cell: int,
    prefix_hit: bool,
    chunk: int,
    files: tuple[Path, ...],
    dtype: str,
    name: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Retrieval of a fact planted in a long text.

    The text is Moby-Dick, or your own; the fact a city's secret code, which the model has to
    write again at the end. Scores are relative to the unquantised model on the same prompts,
    and nothing is measured where that one finds less than 80%. The interval is of the share
    found, as so many prompts show it (Wilson's).
    """
    measure = require("kvstow.evaluate.needle")
    window = measure.Window(
        tuple(sorted(set(lengths))), chosen_depths(depths, n_depths), per_cell, prefix_hit, chunk
    )
    check_fit(read_config(model).context_length, window)
    texts = chosen_texts(files, SOURCES)
    with bench(model, arms, dtype=dtype, output=output, name=name) as on:
        rows = on.measure(questions(on, arms, texts, window), show=row_shower(as_json))
    if not as_json:
        show(rows)


def chosen_depths(depths: Iterable[float], n: int | None) -> tuple[float, ...]:
    """Those of ``--depth``, or as many as ``--depths`` says.

    >>> chosen_depths([], 3)
    (0.0, 0.5, 1.0)

    Raises:
        click.UsageError: If both are given.
    """
    named = tuple(sorted(set(depths)))
    if named and n is not None:
        raise click.UsageError(f"give --depth or --depths, got both: {named} and {n}")
    return named or tuple(np.linspace(0, 1, n or 5).round(4).tolist())


def check_fit(limit: int | None, window: Any) -> None:
    """Refuse a window beyond the model's context, as `check_context` does."""
    answer = require("kvstow.evaluate.needle").ANSWER_TOKENS
    check_context(limit, "--length", max(window.lengths), answer, "tokens of an answer")


def questions(on: Bench, arms: tuple[Arm, ...], texts: Sequence[Text], window: Any) -> list[Any]:
    """One per arm, for `Bench.measure`."""
    haystack = require("kvstow.evaluate.haystack")
    prompts = window.prompts(haystack.Haystack(on.tokenizer, texts))
    reference = require("kvstow.evaluate.needle").Reference(on.model, on.tokenizer, prompts, window)
    about = {
        "measure": "needle",
        "window": window.as_dict(),
        "texts": haystack.about(texts, prompts),
    }

    def answer(arm: Arm, step: Step) -> Row:
        row: Row = reference.score(arm, on_step=step)
        return row

    return [({**about, "arm": str(arm)}, partial(answer, arm)) for arm in arms]


def show(rows: list[Row]) -> None:
    """Print the table."""
    table_console().print(table(rows))


def table(rows: list[Row]) -> Table:
    """The rows for people: one column per length, all depths together."""
    first = rows[0]
    window = first["window"]
    n = sum(cell["n"] for cell in first["cells"])
    hit = ", on a prefix hit" if window["prefix_hit"] else ""
    depths = ", ".join(f"{depth:g}" for depth in window["depths"])
    shown = Table(
        title=f"facts found by {first['model']} in {first['dtype']}{hit}; n = {n} prompts at "
        f"depths {depths}; without quantisation {first['score_off']:.0%}"
    )
    for column in ("arm", "fetch", "layers"):
        shown.add_column(column, no_wrap=True)
    columns = ["bits", *(f"{length} tokens" for length in window["lengths"])]
    for column in (*columns, "found", "95% interval", "vs off"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        by_length = [
            [cell for cell in row["cells"] if cell["length"] == length]
            for length in window["lengths"]
        ]
        shown.add_row(
            label(row),
            row["fetch"],
            "{} of {}".format(*row["layers"]),
            f"{row['bits_per_value']:.2f}",
            *(f"{_sum(cells, 'found')} of {_sum(cells, 'n')}" for cells in by_length),
            f"{row['score']:.0%}",
            "{:.0%} to {:.0%}".format(*found_interval(row["cells"])),
            f"{row['relative']:.2f}",
        )
    shown.caption = caption(rows)
    return shown


def _sum(cells: list[Row], key: str) -> int:
    return sum(cell[key] for cell in cells)

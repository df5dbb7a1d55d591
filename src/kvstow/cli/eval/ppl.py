"""``kvstow eval ppl``: perplexity of texts read through the quantised cache."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
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
from kvstow.evaluate.texts import Text, passages
from kvstow.models import read_config
from kvstow.require import require

DEFAULT_ARMS = ("off", "affine:8", "affine:4", "turbo:k8v8", "turbo:k8v4", "turbo:k8v3")


@click.command()
@common.model
@params.arms(DEFAULT_ARMS)
@params.texts
@params.text_files
@params.sources
@click.option(
    "--tokens",
    type=click.IntRange(min=3),
    default=512,
    show_default=True,
    help="Tokens of each text.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Tokens that are read at a time; the first chunk is not scored. 1: token by token from "
    "the first, as an answer is written (pseudo-decode).",
)
@params.dtype
@params.name
@params.output
@common.as_json
def ppl(
    *,
    model: str,
    arms: tuple[Arm, ...],
    n_texts: int | None,
    files: tuple[Path, ...],
    sources: tuple[str, ...],
    tokens: int,
    chunk: int,
    dtype: str,
    name: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Perplexity of texts read through the quantised cache.

    Each chunk of a text attends to what is stored of those before it, and its tokens are scored
    from the second chunk on. The change is in nats per token, against the unquantised model on
    the same chunks; its interval is a bootstrap over texts.
    """
    measure = require("kvstow.evaluate.perplexity")
    window = measure.Window(tokens, chunk)
    check_fit(read_config(model).context_length, window)
    texts = chosen_texts(files, sources, n_texts)
    with bench(model, arms, dtype=dtype, output=output, name=name) as on:
        rows = on.measure(questions(on, arms, texts, window), show=row_shower(as_json))
    if not as_json:
        show(rows)


def check_fit(limit: int | None, window: Any) -> None:
    """Refuse a window beyond the model's context, as `check_context` does."""
    check_context(limit, "--tokens", window.n_tokens)


def questions(on: Bench, arms: tuple[Arm, ...], texts: Sequence[Text], window: Any) -> list[Any]:
    """One per arm, for `Bench.measure`."""
    read = passages(on.tokenizer, texts, window.n_tokens)
    reference = require("kvstow.evaluate.perplexity").Reference(on.model, read, window)
    about = {"measure": "ppl", "window": window.as_dict(), "texts": read.about()}

    def answer(arm: Arm, step: Step) -> Row:
        row: Row = reference.score(arm, on_step=step).as_dict()
        return row

    return [({**about, "arm": str(arm)}, partial(answer, arm)) for arm in arms]


def show(rows: list[Row]) -> None:
    """Print the table."""
    table_console().print(table(rows))


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    first = rows[0]
    shown = Table(
        title=f"perplexity of {first['model']} in {first['dtype']} through the cache; n = "
        f"{first['texts']['n_texts']} texts of {first['window']['n_tokens']} tokens in chunks of "
        f"{first['window']['chunk_tokens']}, {first['n_scored_tokens']} tokens scored; "
        f"without quantisation {first['ppl_off']:.3f}"
    )
    for column in ("arm", "fetch", "layers"):
        shown.add_column(column, no_wrap=True)
    for column in ("bits", "ppl", "change in nats", "95% interval"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["interval_95"]
        shown.add_row(
            label(row),
            row["fetch"],
            "{} of {}".format(*row["layers"]),
            f"{row['bits_per_value']:.2f}",
            f"{row['ppl']:.3f}",
            f"{row['mean_change_nats']:+.5f}",
            f"{low:+.5f} to {high:+.5f}",
        )
    shown.caption = caption(rows)
    return shown

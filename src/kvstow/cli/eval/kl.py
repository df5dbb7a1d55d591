"""``kvstow eval kl``: the seed's Gate 3, on the user's own model."""

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

DEFAULT_ARMS = (
    *("off", "affine:8", "affine:4", "turbo:k8v8", "turbo:k8v4", "turbo:k8v3"),
    *("turbo:k8v3@keys", "turbo:k8v3@values", "turbo:k4v3"),
)


@click.command()
@common.model
@params.arms(DEFAULT_ARMS)
@params.texts
@params.text_files
@params.sources
@click.option(
    "--prefix",
    type=click.IntRange(min=1),
    default=127,
    show_default=True,
    help="Tokens in the cache before the first scored step.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Scored tokens of each text, fed one at a time.",
)
@click.option(
    "--build",
    type=click.Choice(["convert", "append"]),
    default="convert",
    show_default=True,
    help="convert: the prefix is stored at once; append: token by token, each attending to "
    "what is stored (pseudo-decode).",
)
@params.dtype
@params.name
@params.output
@common.as_json
def kl(
    *,
    model: str,
    arms: tuple[Arm, ...],
    n_texts: int | None,
    files: tuple[Path, ...],
    sources: tuple[str, ...],
    prefix: int,
    steps: int,
    build: Any,
    dtype: str,
    name: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """KL of the next token against the unquantised model.

    Teacher-forced: every arm reads the same true tokens. The interval is a bootstrap
    over texts. Without arms of their own, controls are measured too: off (exactly 0),
    mlx-lm's affine caches, keys only and values only.
    """
    measure = require("kvstow.evaluate.kl")
    window = measure.Window(prefix, steps, build)
    check_fit(read_config(model).context_length, window)
    texts = chosen_texts(files, sources, n_texts)
    with bench(model, arms, dtype=dtype, output=output, name=name) as on:
        rows = on.measure(questions(on, arms, texts, window), show=row_shower(as_json))
    if not as_json:
        show(rows)


def check_fit(limit: int | None, window: Any) -> None:
    """Refuse a window beyond the model's context, as `check_context` does."""
    check_context(limit, "--prefix", window.prefix_tokens, window.steps, "steps")


def questions(on: Bench, arms: tuple[Arm, ...], texts: Sequence[Text], window: Any) -> list[Any]:
    """One per arm, for `Bench.measure`."""
    measure = require("kvstow.evaluate.kl")
    read = passages(on.tokenizer, texts, window.n_tokens)
    reference = measure.Reference(on.model, read, window)
    about = {"measure": "kl", "window": window.as_dict(), "texts": read.about()}

    def answer(arm: Arm, step: Step) -> Row:
        scores: Row = reference.score(arm, on_step=step).as_dict()
        return {**scores, "reference_ppl": round(reference.perplexity, 4)}

    return [({**about, "arm": str(arm)}, partial(answer, arm)) for arm in arms]


def show(rows: list[Row]) -> None:
    """Print the table."""
    table_console().print(table(rows))


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    first = rows[0]
    title = (
        f"KL in nats against the unquantised {first['model']} in {first['dtype']}; "
        f"n = {first['texts']['n_texts']} texts of {first['window']['prefix_tokens']} + "
        f"{first['window']['steps']} tokens; perplexity without quantisation "
        f"{first['reference_ppl']:.2f}"
    )
    shown = Table(title=title)
    for column in ("arm", "fetch", "layers"):
        shown.add_column(column, no_wrap=True)
    for column in ("bits", "mean KL", "95% interval", "p99.9", "top-1", "log ppl"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["interval_95"]
        shown.add_row(
            label(row),
            row["fetch"],
            "{} of {}".format(*row["layers"]),
            f"{row['bits_per_value']:.2f}",
            f"{row['mean_kl_nats']:.5f}",
            f"{low:.5f} to {high:.5f}",
            f"{row['p999_kl_nats']:.4f}",
            f"{row['top1_agreement']:.1%}",
            f"{row['change_of_log_ppl']:+.4f}",
        )
    shown.caption = caption(rows)
    return shown

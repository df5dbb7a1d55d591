"""``kvstow bench``: speed and memory under each scheme, on the user's own model."""

import json
import sys
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvstow.blas import use_fast_blas
from kvstow.cli import params
from kvstow.cli.console import say, table_console
from kvstow.cli.refuse import check_context, check_fetch, refuse
from kvstow.evaluate.environment import environment
from kvstow.models import load, read_config
from kvstow.require import require
from kvstow.scheme import Scheme

DEFAULT_SCHEMES = ("off", "affine:8", "affine:4", "turbo:k8v4", "turbo:k8v3", "turbo:k4v3")
DEFAULT_CONTEXTS = (512, 2048)


@click.command()
@params.model
@params.kv_quants(DEFAULT_SCHEMES)
@click.option(
    "--tokens",
    "contexts",
    type=click.IntRange(min=1),
    multiple=True,
    default=DEFAULT_CONTEXTS,
    show_default=True,
    help="A context length; may be repeated.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Turns of each scheme, of four tokens each.",
)
@params.fetch
@params.dtype
@click.option(
    "--output",
    type=click.File("a", encoding="utf-8"),
    help="Append one JSON row per scheme and length to this file.",
)
@params.as_json
def bench(
    *,
    model: str,
    schemes: tuple[Scheme, ...],
    contexts: tuple[int, ...],
    rounds: int,
    fetch: Any,
    dtype: str | None,
    output: IO[str] | None,
    as_json: bool,
) -> None:
    """Measure prompt and decode speed and peak memory under several schemes.

    All schemes run in one process and decode in turns. Affine caches are converted
    from the plain one, so they have no prompt rate and no peak of their own. A scheme
    that cannot run here has a row that says why.
    """
    check_fetch(fetch, schemes)
    config = read_config(model)
    measure = require("kvstow.evaluate.bench")
    n_steps = (1 + rounds) * measure.TURN_STEPS
    check_context(config.context_length, "--tokens", max(contexts), n_steps, "decode steps")
    refuse(config.config, schemes, fetch, dtype)
    blas = use_fast_blas()
    say(blas.notice)
    loaded, _ = load(model, dtype=dtype)
    console = Console(stderr=True)
    command = " ".join(["kvstow", *sys.argv[1:]])
    about = {"bench": "decode", "model": Path(model).name, **environment(command, blas)}
    rows = []
    with console.status("starting") as status:
        runs = measure.run(
            loaded,
            list(schemes),
            list(contexts),
            fetch=fetch,
            rounds=rounds,
            on_step=status.update,
        )
        for row in runs:
            rows.append(row)
            line = json.dumps({**about, **row.as_dict()})
            if output is not None:
                print(line, file=output, flush=True)
            if as_json:
                click.echo(line)
    if not as_json:
        table_console().print(table(rows))


def table(rows: list[Any]) -> Table:
    """The rows for people, with the reasons of refused ones below."""
    shown = Table(title="prompt and decode in tokens/s; parts of a decode step; MB = 10^6 bytes")
    for name in ("tokens", "scheme", "fetch"):
        shown.add_column(name, no_wrap=True)
    for name in ("prompt", "decode", "vs off", "attend", "encode", "KV MB", "vs bf16", "peak MB"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            f"{row.context_tokens}",
            row.scheme,
            row.fetch,
            _cell(row.prompt_tokens_per_s, "{:.1f}"),
            "refused" if row.refused else f"{row.decode_tokens_per_s:.1f}",
            _cell(row.decode_vs_off, "{:.2f}x"),
            _cell(row.attention_share, "{:.0%}"),
            _cell(row.encode_share, "{:.0%}"),
            _cell(row.kv_bytes, "{:.1f}", 1e6),
            "-" if row.refused else f"{row.kv_bytes_bf16 / row.kv_bytes:.2f}x",
            _cell(row.peak_memory_bytes, "{:.0f}", 1e6),
        )
    reasons = {f"{row.scheme} is refused: {row.refused}" for row in rows if row.refused}
    if reasons:
        shown.caption = escape("\n".join(sorted(reasons)))
        shown.caption_justify = "left"
    return shown


def _cell(value: float | None, text: str, unit: float = 1) -> str:
    return "-" if value is None else text.format(value / unit)

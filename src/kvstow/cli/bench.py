"""``kvstow bench``: speed and memory under each scheme, on the user's own model."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

from kvstow.blas import use_fast_blas
from kvstow.cli import params
from kvstow.cli.environment import environment
from kvstow.models import load
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
    help="Decode steps per scheme, taken in turns.",
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
    from the plain one, so they have no prompt rate and no peak of their own.
    """
    blas = use_fast_blas()
    click.echo(blas.notice, err=True)
    loaded, _ = load(model, dtype=dtype)
    limit = getattr(loaded.args, "max_position_embeddings", None)
    if limit is not None and max(contexts) + rounds >= limit:
        raise click.UsageError(f"--tokens must be below the model's context of {limit} tokens")
    console = Console(stderr=True)
    measure: Any = import_module("kvstow.bench")
    command = " ".join(["kvstow", *sys.argv[1:]])
    about = {"bench": "decode", "model": Path(model).name, **environment(command, blas)}
    rows = []
    with console.status("starting") as status:
        runs = measure.run(
            loaded, list(schemes), list(contexts), fetch=fetch, rounds=rounds, on_step=status.update
        )
        for row in runs:
            rows.append(row)
            line = json.dumps({**about, **row.as_dict()})
            if output is not None:
                print(line, file=output, flush=True)
            if as_json:
                click.echo(line)
    if not as_json:
        Console().print(table(rows))


def table(rows: list[Any]) -> Table:
    """The rows for people."""
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
            "-" if row.prompt_tokens_per_s is None else f"{row.prompt_tokens_per_s:.1f}",
            f"{row.decode_tokens_per_s:.1f}",
            "-" if row.decode_vs_off is None else f"{row.decode_vs_off:.2f}x",
            f"{row.attention_share:.0%}",
            f"{row.encode_share:.0%}",
            f"{row.kv_bytes / 1e6:.1f}",
            f"{row.kv_bytes_bf16 / row.kv_bytes:.2f}x",
            "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e6:.0f}",
        )
    return shown

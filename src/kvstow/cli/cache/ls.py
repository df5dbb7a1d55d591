"""``kvstow cache ls``: what a prefix cache holds, and what files hold that were saved by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from kvstow.cli import params
from kvstow.cli.cache import saved
from kvstow.cli.console import table_console
from kvstow.cli.fit import size_text


@click.command()
@click.argument("paths", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@saved.where
@params.as_json
def ls(*, paths: tuple[Path, ...], prefix_cache: Path, as_json: bool) -> None:
    """List the prefixes on disk, the last used one first, or saved FILEs.

    Headers are read and checked, not all bytes: `kvstow cache show` and `gc` read those.
    """
    found = list(saved.of_files(paths)) if paths else saved.of_prefixes(prefix_cache)
    if as_json:
        click.echo(json.dumps([x.as_dict() for x in found]))
    elif not found:
        click.echo(f"no prefixes in {prefix_cache}")
    else:
        table_console().print(_table(found))
        total = sum(x.bytes for x in found)
        click.echo(f"{len(found)} in {size_text(total)}")


def _table(found: Sequence[saved.Saved]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("name", no_wrap=True)
    for heading in ("tokens", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("last used", "scheme", "model"):
        table.add_column(heading, overflow="fold")
    for x in found:
        tokens = "" if x.tokens is None else f"{x.tokens:,}"
        about = (x.scheme or "", x.model or x.problem or "")
        table.add_row(x.name, tokens, size_text(x.bytes), x.used[:19].replace("T", " "), *about)
    return table

"""Files of rows, as the verbs that measure nothing read them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from kvstow.cli.console import say
from kvstow.evaluate.rows import ResultFile, Row, read_rows

files = click.argument(
    "files",
    metavar="ROWS.jsonl...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    nargs=-1,
    required=True,
)


def read(paths: Sequence[Path]) -> list[Row]:
    """The rows of all files; says on standard error which of them end in half a row."""
    rows = read_rows(paths)
    for path in paths:
        if ResultFile(path).interrupted:
            say(f"{path}: its last row is not whole, it is left out")
    return rows


def with_suffix(*suffixes: str) -> Callable[[click.Context, click.Parameter, Path], Path]:
    """Make a callback that refuses a file of another kind as a usage error."""

    def check(_: click.Context, __: click.Parameter, path: Path) -> Path:
        if path.suffix.lower() not in suffixes:
            raise click.BadParameter(f"{str(path)!r} does not end in {' or '.join(suffixes)}.")
        return path

    return check

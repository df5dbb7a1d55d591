"""Where the commands print what is not their result."""

import click
from rich.console import Console

PIPE_COLUMNS = 120


def say(line: str) -> None:
    """One line on standard error; nothing if it is empty."""
    if line:
        click.echo(line, err=True)


def table_console() -> Console:
    """Standard output for tables, wide enough to be read when it is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console

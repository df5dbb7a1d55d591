"""Write `docs/cli.md` from the help texts of the commands. Run it after changing an option.

Usage: python tools/make_cli_docs.py
"""

from collections.abc import Iterator
from pathlib import Path

import click

from kvstow.cli import main

WIDTH = 100
HEAD = """\
# The commands and their options

Written by `tools/make_cli_docs.py` from the help texts of the commands: edit those, not this
page.

Exit codes: 0; 1 for an error that has a name, with its message on standard error; 2 for an option
that cannot be read; 130 after an interrupt.

## Environment variables

- `KVSTOW_CACHE`: the directory for converted GGUF models, and for what kernels' self-checks have
  found; by default `kvstow` in the platform's cache directory, `~/.cache/kvstow` on Linux. A
  converted SmolLM2 takes 538 MB. Everything in it can be deleted at any time. A conversion that is
  killed leaves a partial directory, which a later conversion of the same file removes once it is a
  day old.
- `KVSTOW_API_KEY`: `--api-key` of `kvstow serve`, where other users of the machine cannot read it.
- `KVSTOW_BLAS`: the BLAS that mlx uses on a CPU under Linux: `auto` (the default: OpenBLAS if it
  is installed, else MKL, else mlx's own), `off` (mlx's own), `openblas` or `mkl`. One that is
  named and cannot be used is an error.
"""


def page() -> str:
    """The text of docs/cli.md."""
    context = click.Context(main, info_name="kvstow", **main.context_settings)
    return "\n".join([HEAD, *_sections(context)])


def _sections(context: click.Context) -> Iterator[str]:
    yield _section(context)
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            if command is not None:
                yield from _sections(click.Context(command, context, info_name=name))


def _section(context: click.Context) -> str:
    context.terminal_width = context.max_content_width = WIDTH  # whatever the terminal is
    return f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n"


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
    path.write_text(page(), encoding="utf-8")

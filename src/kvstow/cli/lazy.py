"""A group of commands that are imported when they run, so that help is quick."""

from collections.abc import Mapping
from typing import Any

import click

from kvstow.require import require

Commands = Mapping[str, tuple[str, str]]


class LazyGroup(click.Group):
    """A click group over ``{name: (module, one line of help)}``.

    The module holds the command under the same name, or as ``<name>_command`` where that
    would hide a builtin.
    """

    def __init__(self, *args: Any, commands: Commands, **options: Any) -> None:
        super().__init__(*args, **options)
        self._modules = commands

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Name the commands, in the order a user meets them."""
        return list(self._modules)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        """Import one command."""
        if cmd_name not in self._modules:
            return None
        module = require(self._modules[cmd_name][0])
        command: click.Command = getattr(module, cmd_name, None) or getattr(
            module, f"{cmd_name}_command"
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        rows = [(name, self._modules[name][1]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

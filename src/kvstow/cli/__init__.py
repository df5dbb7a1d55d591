"""The ``kvstow`` command: parse, call one function, print.

Commands are imported when they run, so that ``kvstow --help`` is quick. Exit
codes: 0, 1 for kvstow's own errors, a missing extra among them, 2 for usage,
130 for an interrupt.
"""

import errno
import os
from typing import Any

import click

from kvstow.errors import KvstowError
from kvstow.require import require

# name -> (module, one line of help); the module holds the command under the same name.
COMMANDS = {
    "generate": ("kvstow.cli.generate", "Answer a prompt with the KV cache stored under a scheme."),
    "fit": ("kvstow.cli.fit", "Say what a context costs under each scheme, without weights."),
    "bench": (
        "kvstow.cli.bench",
        "Measure prompt and decode speed and peak memory under several schemes.",
    ),
}
INTERRUPTED = 130


class Main(click.Group):
    """A group of lazy commands that prints kvstow's own errors as one line, and no others."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Name the commands, in the order a user meets them."""
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(require(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        rows = [(name, COMMANDS[name][1]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and end with the exit codes of this module's docstring."""
        # Tokenizers need no PyTorch, and transformers says at each start that it has none.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            return super().invoke(ctx)
        except KvstowError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has gone: click ends quietly
                raise
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvstow")
def main() -> None:
    """Keep the KV cache of a language model in few bits."""

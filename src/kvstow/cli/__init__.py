"""The ``kvstow`` command: parse, call one function, print.

Commands are imported when they run, so that ``kvstow --help`` is quick. Exit
codes: 0, 1 for kvstow's own errors, a missing extra among them, 2 for usage,
130 for an interrupt.
"""

import errno
import os
from typing import Any

import click

from kvstow.cli.launcher import told_rank
from kvstow.cli.lazy import LazyGroup
from kvstow.cli.warn import warnings_as_lines
from kvstow.errors import KvstowError

COMMANDS = {
    "generate": ("kvstow.cli.generate", "Answer a prompt with the KV cache stored under a scheme."),
    "cache": (
        "kvstow.cli.cache",
        "Save the KV cache of a long prompt once, and use it many times.",
    ),
    "serve": ("kvstow.cli.serve", "Answer over HTTP, as OpenAI's interface does."),
    "fit": ("kvstow.cli.fit", "Say what a context costs under each scheme, without weights."),
    "bench": (
        "kvstow.cli.bench",
        "Measure prompt and decode speed and peak memory under several schemes.",
    ),
    "doctor": ("kvstow.cli.doctor", "Say what works on this machine, and what does not and why."),
    "eval": ("kvstow.cli.eval", "Measure what each scheme costs in quality, on your own model."),
}
SHARED = frozenset({"generate"})  # what several processes can do together
INTERRUPTED = 130


class Main(LazyGroup):
    """The group of all commands: kvstow's own errors and warnings are one line each."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; where each of several processes would run it alone, refuse it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name not in SHARED and told_rank() not in (None, "0"):
            ctx.fail(f"'{name}' works in one process, and several were started")
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and end with the exit codes of this module's docstring."""
        # Tokenizers need no PyTorch, and transformers says at each start that it has none.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            with warnings_as_lines():
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


@click.group(cls=Main, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvstow")
def main() -> None:
    """Keep the KV cache of a language model in few bits."""

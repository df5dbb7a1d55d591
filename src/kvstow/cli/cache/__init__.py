"""``kvstow cache``: KV caches in files, to compute a long prompt once and use it many times."""

import click

from kvstow.cli.lazy import LazyGroup

COMMANDS = {
    "save": ("kvstow.cli.cache.save", "Read a prompt and save its KV cache in a file."),
    "show": ("kvstow.cli.cache.show", "Say what FILE holds, and check every byte of it."),
}


@click.group(cls=LazyGroup, commands=COMMANDS)
def cache() -> None:
    """Save the KV cache of a long prompt once, and use it many times.

    `kvstow generate --resume FILE` goes on from such a file.
    """

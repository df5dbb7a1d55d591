"""``kvstow cache``: KV caches in files, to compute a long prompt once and use it many times."""

import click

from kvstow.cli.lazy import LazyGroup

COMMANDS = {
    "save": ("kvstow.cli.cache.save", "Read a prompt and save its KV cache in a file."),
    "show": ("kvstow.cli.cache.show", "Say what FILE holds, and check every byte of it."),
    "ls": (
        "kvstow.cli.cache.ls",
        "List the prefixes on disk, the last used one first, or saved FILEs.",
    ),
    "rm": ("kvstow.cli.cache.rm", "Remove prefixes from disk by their NAMEs, or saved FILEs."),
    "gc": ("kvstow.cli.cache.gc", "Read every byte of a prefix cache, and remove what is damaged."),
}


@click.group(cls=LazyGroup, commands=COMMANDS)
def cache() -> None:
    """Save the KV cache of a long prompt once, and use it many times.

    `kvstow generate --resume FILE` goes on from such a file. A prefix cache
    (`kvstow generate --prefix-cache DIR`) is a directory of them that fills itself.
    """

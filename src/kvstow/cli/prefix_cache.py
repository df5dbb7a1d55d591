"""``--prefix-cache``: prompts that are read once, by whatever process, and found on disk by it."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from kvstow.cache_dir import cache_dir
from kvstow.cli import params
from kvstow.errors import KvstowWarning
from kvstow.require import require
from kvstow.snapshot.prefixes import DEFAULT_MAX_BYTES, DEFAULT_MIN_TOKENS

AUTO = "auto"


def directory(value: str) -> Path:
    """Read a directory, or ``auto`` for the one under KVSTOW_CACHE."""
    if value == AUTO:
        return cache_dir() / "prefixes"
    path = Path(value).expanduser()
    if _is_there(path) and not path.is_dir():
        raise click.BadParameter(f"{value!r} is there and no directory")
    return path


@dataclass(slots=True)
class PrefixCache:
    """What the two options ask for.

    Attributes:
        directory: None where prefixes are not kept.
        asked_bytes: What its files may take, where that was said.
        stats: What was done, once it is closed.
    """

    directory: Path | None
    asked_bytes: int | None
    stats: dict[str, int] | None = None

    @property
    def max_bytes(self) -> int:
        """What its files may take."""
        return DEFAULT_MAX_BYTES if self.asked_bytes is None else self.asked_bytes

    def check_options(self, *, resume: Path | None, draft: str | None, n_processes: int) -> None:
        """Refuse what would not be kept.

        Raises:
            click.UsageError: If these options contradict others.
        """
        if self.directory is None:
            if self.asked_bytes is not None:
                raise click.UsageError("--prefix-cache-bytes needs --prefix-cache, got none")
            return
        if resume is not None:
            raise click.UsageError("give one of --prefix-cache and --resume, got both")
        if draft is not None:
            raise click.UsageError(
                "--draft-model has not read what is in --prefix-cache: give one of them"
            )
        if n_processes > 1:
            raise click.UsageError(
                f"--prefix-cache works in one process, and {n_processes} were started"
            )
        _check_writable(self.directory)

    @contextmanager
    def opened(self, model: Any, tokenizer: Any, name: str) -> Iterator[Any]:
        """The `ModelPrefixes` of an attached model; None where there are none.

        All is written when the block ends.

        Args:
            model: The model.
            tokenizer: Of the model.
            name: What the user calls the model.
        """
        if self.directory is None:
            yield None
            return
        module = require("kvstow.integrations.mlx_lm.disk_prefixes")
        with module.DiskPrefixes(self.directory, max_bytes=self.max_bytes) as disk:
            yield disk.of(model, tokenizer, {"model": name})
        self.stats = disk.stats.as_dict()

    def lines(self) -> list[str]:
        """What was done, for people."""
        if self.stats is None:
            return []
        read, wrote = self.stats["disk_tokens"], self.stats["written_bytes"]
        return [f"prefixes    {read} tokens read, {wrote:,} bytes written in {self.directory}"]


def _is_there(path: Path) -> bool:
    """Whether something is there; `Path.exists` raises where it may not look."""
    return os.access(path, os.F_OK)


def _check_writable(directory: Path) -> None:
    """Warn of a directory that can only be read, before anything is read in vain.

    Raises:
        click.UsageError: If there is no directory, and none can be made.
    """
    there = next(filter(_is_there, (directory, *directory.parents)))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return
    if there != directory:
        raise click.UsageError(
            f"--prefix-cache {directory} cannot be made: {there} is no directory to write in"
        )
    warnings.warn(
        f"--prefix-cache {directory} cannot be written: prefixes are only read from it",
        KvstowWarning,
        stacklevel=2,
    )


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--prefix-cache`` and ``--prefix-cache-bytes``, which come as one `PrefixCache`."""

    @wraps(command)
    def with_both(
        *, prefix_cache: Path | None, prefix_cache_bytes: int | None, **options: Any
    ) -> Any:
        return command(kept=PrefixCache(prefix_cache, prefix_cache_bytes), **options)

    size = click.option(
        "--prefix-cache-bytes",
        type=params.size,
        metavar="SIZE",
        help="What all files in --prefix-cache may take, such as 10GB; those that were not used "
        f"for the longest time are removed.  [default: {DEFAULT_MAX_BYTES // 10**9}GB]",
    )
    where = click.option(
        "--prefix-cache",
        type=directory,
        metavar="DIR",
        help="Keep what is read of prompts in this directory, and go on from the longest beginning "
        f"of a prompt that it holds, of {DEFAULT_MIN_TOKENS} tokens or more; {AUTO} is "
        "`prefixes` under KVSTOW_CACHE.",
    )
    return where(size(with_both))

"""Saved caches as `ls` and `rm` name them: those of a prefix cache, and files saved by hand."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from kvstow.cli.prefix_cache import AUTO, directory
from kvstow.errors import SnapshotError
from kvstow.snapshot import Snapshot
from kvstow.snapshot.prefixes import files

where: Callable[[Any], Any] = click.option(
    "--prefix-cache",
    type=directory,
    metavar="DIR",
    default=AUTO,
    show_default=True,
    help="The directory of `kvstow generate --prefix-cache`.",
)


@dataclass(frozen=True, slots=True)
class Saved:
    """One file.

    Attributes:
        name: What `rm` calls it.
        file: Its path.
        bytes: Its size.
        used: When it was last used, ISO 8601, UTC; of a file saved by hand, written.
        model: What the user called the model; its architecture where that is not known.
        scheme: The scheme or policy.
        tokens: How many it holds.
        problem: Why these are not known, if they are not.
    """

    name: str
    file: str
    bytes: int
    used: str
    model: str | None = None
    scheme: str | None = None
    tokens: int | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def of_prefixes(root: Path) -> list[Saved]:
    """Every prefix in a directory, the one that was used last first."""
    found = [_saved(name_of(x.path), x.path) for x in reversed(files.entries(root))]
    return [x for x in found if x is not None]  # others may remove some meanwhile


def of_files(paths: tuple[Path, ...]) -> Iterator[Saved]:
    """The files that were named.

    Raises:
        click.UsageError: If one is not there.
    """
    for path in paths:
        saved = _saved(str(path), path)
        if saved is None:
            raise click.UsageError(f"there is no file {path}")
        yield saved


def name_of(path: Path) -> str:
    """The short name of a prefix: of its folder, and of its tokens."""
    return f"{path.parent.name[:6]}-{path.stem.rpartition('-')[2][:8]}"


def _saved(name: str, path: Path) -> Saved | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    used = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat(timespec="seconds")
    about = (name, str(path), stat.st_size, used)
    try:
        with Snapshot(path) as snapshot:
            said = snapshot.manifest
    except SnapshotError as error:
        return Saved(*about, problem=str(error).removeprefix(f"{path}: "))
    model = said.notes.get("model") or said.model.architecture
    return Saved(*about, model, str(said.policy), said.n_tokens)

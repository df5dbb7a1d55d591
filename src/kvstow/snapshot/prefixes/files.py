"""The files of a directory of prefixes: what is there, when it was used, what has to go.

Other processes add and remove files at any time, so a file that is gone is no error.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstow.snapshot.prefixes.names import SUFFIX, Name, is_key
from kvstow.snapshot.write import ABANDONED_AFTER_S


@dataclass(frozen=True, slots=True, order=True)
class Stored:
    """One file.

    Attributes:
        used_ns: When it was last used, as its time of change says.
        path: Where it is.
        n_bytes: Its size.
    """

    used_ns: int
    path: Path
    n_bytes: int

    @property
    def is_abandoned(self) -> bool:
        """Whether its writer is dead by all appearances."""
        age_s = time.time() - self.used_ns / 1e9
        return self.path.name.startswith(".") and age_s > ABANDONED_AFTER_S


def entries(root: Path) -> list[Stored]:
    """Every saved prefix, the one that was not used for the longest time first."""
    return sorted(x for x in _files(root) if Name.parse(x.path.name))


def temporary(root: Path) -> list[Stored]:
    """Every file that is being written, or was when its writer died."""
    return [x for x in _files(root) if x.path.name.startswith(".") and SUFFIX in x.path.name]


def mark_used(root: Path, path: Path) -> None:
    """Make `path` the last one to be evicted, whatever the clock says.

    A clock that was set back would make what is used now older than what was used then.
    """
    found = _stats(root)
    newest = max((stat.st_mtime_ns for file, stat in found if file.path != str(path)), default=0)
    now = max(time.time_ns(), newest + 1)
    with contextlib.suppress(OSError):  # gone, or a directory that is only read
        os.utime(path, ns=(now, now))


def evict(root: Path, max_bytes: int) -> list[Path]:
    """Remove what killed writers left, and what was not used for the longest time.

    Returns:
        The prefixes removed; what is left, unfinished files included, takes `max_bytes` at most,
        unless others write, or a file cannot be removed.
    """
    unfinished = temporary(root)
    for file in unfinished:
        if file.is_abandoned:
            remove(file.path)
    n_bytes = sum(x.n_bytes for x in unfinished if not x.is_abandoned)
    return [x.path for x in surplus(entries(root), max_bytes - n_bytes) if remove(x.path)]


def surplus(held: Sequence[Stored], max_bytes: int) -> list[Stored]:
    """The first of `held` that have to go so that the others take `max_bytes` at most."""
    n_bytes, gone = sum(x.n_bytes for x in held), []
    for file in held:
        if n_bytes <= max_bytes:
            break
        gone.append(file)
        n_bytes -= file.n_bytes
    return gone


def remove(path: Path) -> bool:
    """Remove a file; whether it is gone, be it by another's hand."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def is_gone(path: Path) -> bool:
    """Whether a file is not there; one that cannot be looked at is."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder; nothing where it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        yield from found


def _files(root: Path) -> Iterator[Stored]:
    for file, stat in _stats(root):
        yield Stored(stat.st_mtime_ns, Path(file.path), stat.st_size)


def _stats(root: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    for folder in scan(root):
        if not is_key(folder.name):
            continue
        for file in scan(Path(folder.path)):
            with contextlib.suppress(OSError):
                if file.is_file(follow_symlinks=False):
                    yield file, file.stat(follow_symlinks=False)

"""Where what can be made again is kept between runs, and how a file is recognised.

``KVSTOW_CACHE`` names the directory; without it, the platform's own place for
caches is used. Everything in it can be deleted at any time.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvstow.errors import ModelFileError

Progress = Callable[[int, int, str], None]
CHUNK_BYTES = 1 << 24


def cache_dir() -> Path:
    """The directory for everything that kvstow can make again."""
    if chosen := os.environ.get("KVSTOW_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvstow"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "kvstow" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstow"


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of a file, remembered by its path, size and modification time.

    Raises:
        ModelFileError: If the file cannot be read.
    """
    stat = path.stat()
    seen = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    note = cache_dir() / "sha256" / hashlib.sha256(seen.encode()).hexdigest()
    with contextlib.suppress(OSError):
        return note.read_text("ascii")
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress(done, stat.st_size, f"Reading {path.name}")
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    write_note(note, digest.hexdigest())
    return digest.hexdigest()


def write_note(note: Path, text: str) -> None:
    """Write a small file at once or not at all; a cache that cannot be written is no error here."""
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(note)

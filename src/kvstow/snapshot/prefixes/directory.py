"""`PrefixDirectory`: find the file that spares most of a prompt, and add one.

A prompt needs no index: what is listed under its key and head is compared with it token by
token. Tokens of a file are read once, when it is first met, and kept. All else in it is
checked when it is used; a file that is not what its name says is removed then, and said so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvstow.errors import DamagedSnapshot, NewerSnapshot, OtherTables, SnapshotError
from kvstow.snapshot.manifest import Manifest
from kvstow.snapshot.prefixes import files
from kvstow.snapshot.prefixes.names import Name, Tokens, head_of, key_of
from kvstow.snapshot.read import Snapshot
from kvstow.snapshot.write import Source, write

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A file that was looked into.

    Attributes:
        path: Where it is.
        tokens: All that it holds.
        least_tokens: To how few of them it can be trimmed.
    """

    path: Path
    tokens: Tokens
    least_tokens: int

    def usable_for(self, tokens: Tokens) -> int:
        """How many of the first `tokens` it spares."""
        n = min(len(tokens), len(self.tokens))
        differ = np.flatnonzero(self.tokens[:n] != tokens[:n])
        common = int(differ[0]) if differ.size else n
        return common if common >= self.least_tokens else 0


@dataclass(frozen=True, slots=True)
class Found:
    """The best entry for a prompt, and how many of its tokens it spares."""

    entry: Entry
    n_tokens: int


class PrefixDirectory:
    """The prefixes below `root`; see the package. The directory need not be there yet.

    Args:
        root: The directory.
        on_problem: Called with one line for every file that cannot be used.
    """

    def __init__(self, root: Path, on_problem: Callable[[str], None] = lambda _: None) -> None:
        self.root = root
        self._on_problem = on_problem
        self._known: dict[str, dict[str, Entry]] = {}
        self._refused: set[Path] = set()

    def nearest(self, key: str, tokens: Tokens) -> Found | None:
        """What spares most of `tokens`; of two that spare as many, the smaller one.

        Args:
            key: From `key_of`.
            tokens: A prompt.
        """
        found = None
        for entry in self._alike(key, tokens):
            n = entry.usable_for(tokens)
            if n and (
                found is None
                or (n, -len(entry.tokens)) > (found.n_tokens, -len(found.entry.tokens))
            ):
                found = Found(entry, n)
        return found

    def take(self, entry: Entry, read: Callable[[Snapshot], T]) -> T | None:
        """What `read` makes of a file, which is marked as used.

        Returns:
            None if it is gone, or turns out to be unusable.
        """
        try:
            with Snapshot(entry.path) as snapshot:
                self._check_still(entry, snapshot)
                made = read(snapshot)
        except SnapshotError as error:
            self._give_up(entry.path, error)
            return None
        files.mark_used(self.root, entry.path)
        return made

    def add(self, tokens: Tokens, manifest: Manifest, sources: Mapping[str, Source]) -> int:
        """Write one more file, and remove those that it makes needless; returns its bytes.

        Args:
            tokens: All that the cache holds.
            manifest: As for `write`.
            sources: As for `write`.

        Raises:
            SnapshotError: If it cannot be written.
        """
        key = key_of(manifest.model, manifest.tokenizer, manifest.policy)
        path = self.root / key / str(Name.of(tokens))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"cannot write {path.parent}: {error.strerror}") from error
        n_bytes = write(path, manifest, sources)
        self._refused.discard(path)
        files.mark_used(self.root, path)
        new = Entry(path, tokens, manifest.least_tokens)
        for entry in self._alike(key, tokens):
            n = len(entry.tokens)
            if n < len(tokens) and new.usable_for(entry.tokens) == n:
                files.remove(entry.path)
        return n_bytes

    def check(self, path: Path) -> None:
        """Read every byte of a file, and compare what it holds with where it is.

        Raises:
            SnapshotError: If it is not what its place and name say.
        """
        with Snapshot(path) as snapshot:
            self._entry_of(snapshot)
            snapshot.verify()

    def _alike(self, key: str, tokens: Tokens) -> list[Entry]:
        """The entries that begin as `tokens` do."""
        head, known = head_of(tokens), self._known.get(key, {})
        alike, listed = [], {}
        for file in files.scan(self.root / key):
            entry, is_alike = known.get(file.name), file.name.startswith(head)
            if entry is None and is_alike and Name.parse(file.name) is not None:
                entry = self._look_into(Path(file.path))
            if entry is not None:
                listed[file.name] = entry
                if is_alike:
                    alike.append(entry)
        self._known[key] = listed
        return [entry for entry in alike if entry.path not in self._refused]

    def _look_into(self, path: Path) -> Entry | None:
        if path in self._refused:
            return None
        try:
            with Snapshot(path) as snapshot:
                return self._entry_of(snapshot)
        except SnapshotError as error:
            self._give_up(path, error)
            return None

    def _check_still(self, entry: Entry, snapshot: Snapshot) -> None:
        """Refuse another file in the place of the one that was looked into.

        Raises:
            DamagedSnapshot: If it holds something else.
        """
        if not np.array_equal(self._entry_of(snapshot).tokens, entry.tokens):
            raise DamagedSnapshot(f"{entry.path}: it holds other tokens than before")

    def _entry_of(self, snapshot: Snapshot) -> Entry:
        """What a file holds.

        Raises:
            DamagedSnapshot: If its place or name says something else.
        """
        tokens, said = snapshot.read("tokens"), snapshot.manifest
        path = snapshot.path
        key = key_of(said.model, said.tokenizer, said.policy)
        if (path.parent.name, path.name) != (key, str(Name.of(tokens))):
            raise DamagedSnapshot(f"{path}: it holds something else than its name says")
        return Entry(path, tokens, said.least_tokens)

    def _give_up(self, path: Path, error: SnapshotError) -> None:
        """Remove a file that nobody can use; leave one that another reader or version may."""
        if files.is_gone(path):
            return
        removed = unusable_for_all(error) and files.remove(path)
        if not removed:
            self._refused.add(path)
        self._on_problem(f"{error}: {'it was removed' if removed else 'it is not used'}")


def unusable_for_all(error: SnapshotError) -> bool:
    """Whether a file is of no use to other versions and users either."""
    return type(error) is not SnapshotError and not isinstance(error, NewerSnapshot | OtherTables)

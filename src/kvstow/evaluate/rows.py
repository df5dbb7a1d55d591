"""A file of results: one JSON object a line, appended as soon as it is measured.

A run that is interrupted loses the row it was measuring and nothing else, and is taken
up again where it stopped: a row is recognised by what was asked (`IDENTITY`), not by
when or where. A last line without an end is a row that was being written; it is cut off
before the file is appended to. Anything else that is no row is refused with its line.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvstow.errors import EvaluationError

Row = dict[str, Any]
# What makes two rows answers to one question. A row lacks those that do not apply to it.
IDENTITY = ("measure", "model", "arm", "dtype", "window", "texts")
KNOWN = ("kl", "ppl", "needle", "profile")


class ResultFile:
    """Rows of one file, those there were and those that are appended.

    Args:
        path: A ``.jsonl`` file, made with the first row; None keeps rows in memory only.

    Raises:
        EvaluationError: If the file holds something that is no row.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.interrupted = False
        if path is not None and path.exists():
            self.rows, size = _parse(path)
            self.interrupted = size < path.stat().st_size
            self._size = size

    def find(self, **identity: Any) -> Row | None:
        """The row that answers the same question, if there is one."""
        wanted = _identity(identity)
        return next((row for row in self.rows if _identity(row) == wanted), None)

    def append(self, row: Row) -> None:
        """Write one row, whole: it is on disk when this returns."""
        line = json.dumps(row)
        if self.path is not None:
            with self.path.open("ab") as file:
                if self.interrupted:
                    file.truncate(self._size)
                    self.interrupted = False
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        self.rows.append(json.loads(line))


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of several files, in order.

    Raises:
        EvaluationError: If there is none, a file cannot be read, or holds something else.
    """
    rows: list[Row] = []
    for path in paths:
        if not path.is_file():
            raise EvaluationError(f"there are no results in {path}: it is not a file")
        rows += ResultFile(path).rows
    if not rows:
        raise EvaluationError("there are no rows of results in these files")
    return rows


def _identity(row: Row) -> str:
    return json.dumps({key: row.get(key) for key in IDENTITY}, sort_keys=True)


def _parse(path: Path) -> tuple[list[Row], int]:
    """The rows of a file, and the bytes up to the end of the last whole one.

    Raises:
        EvaluationError: If the file cannot be read, or a whole line is no row.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvaluationError(f"cannot read results: {error}") from error
    whole = content[: content.rfind(b"\n") + 1]
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.get("measure") not in KNOWN:
            raise EvaluationError(
                f"{path}:{number} is no row of results: expected a JSON object whose "
                f"'measure' is one of {KNOWN}, got {line[:60].decode(errors='replace')!r}"
            )
        rows.append(row)
    return rows, len(whole)

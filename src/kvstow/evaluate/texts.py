"""The texts that are scored: two bundled sources, or a user's own files.

``python`` is the reference manual that every Python carries (`pydoc_data.topics`,
which differs a little between versions), ``moby-dick`` sixteen chapters of Melville's
novel, in the public domain. Neither chose a codebook, a grid or a threshold. Tokens of
one text are not independent, so a text is the unit of every interval.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from kvstow.errors import TextError

SOURCES = ("python", "moby-dick")


@dataclass(frozen=True, slots=True)
class Text:
    """One text: where it is from, its name there, and what it says."""

    source: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Passages:
    """The first tokens of several texts, as rows of one length.

    Attributes:
        tokens: ``(n, n_tokens)``.
        names: ``source/name`` of each row.
    """

    tokens: np.ndarray
    names: tuple[str, ...]

    def first(self, n_tokens: int) -> np.ndarray:
        """The first `n_tokens` of every row.

        Raises:
            TextError: If the rows are shorter.
        """
        if self.tokens.shape[1] < n_tokens:
            raise TextError(
                f"the window needs {n_tokens} tokens, the passages have {self.tokens.shape[1]}"
            )
        return self.tokens[:, :n_tokens]

    def about(self) -> dict[str, Any]:
        """What a row of results says of its texts; equal digests are equal tokens."""
        sources = [name.partition("/")[0] for name in self.names]
        return {
            "n_texts": len(self.names),
            "sources": {source: sources.count(source) for source in dict.fromkeys(sources)},
            "sha256": hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()[:16],
        }


def bundled(sources: Sequence[str] = SOURCES) -> list[Text]:
    """The texts of `sources`, taken in turn, the longest Python topics first.

    Raises:
        TextError: If a source is not one of `SOURCES`.
    """
    if unknown := sorted(set(sources) - set(SOURCES)):
        raise TextError(f"unknown source {unknown[0]!r}; expected one of {SOURCES}")
    of_each = [_BUNDLED[source]() for source in sources]
    longest = max(map(len, of_each), default=0)
    return [texts[i] for i in range(longest) for texts in of_each if i < len(texts)]


def read_files(paths: Sequence[Path]) -> list[Text]:
    """A user's own UTF-8 files.

    Raises:
        TextError: If one cannot be read as text.
    """
    texts = []
    for path in paths:
        try:
            texts.append(Text("file", path.name, path.read_text(encoding="utf-8-sig")))
        except (OSError, UnicodeError) as error:
            raise TextError(f"cannot read {path} as UTF-8 text: {error}") from error
    return texts


def first(texts: Sequence[Text], n: int) -> list[Text]:
    """The first `n` of `texts`.

    Raises:
        TextError: If there are fewer.
    """
    if len(texts) < n:
        raise TextError(f"{n} texts are needed, there are {len(texts)}")
    return list(texts[:n])


def passages(
    tokenizer: Any, texts: Sequence[Text], n_tokens: int, *, n: int | None = None
) -> Passages:
    """The first `n_tokens` tokens of the first `n` of `texts`.

    Raises:
        TextError: If there are fewer than `n` texts, or one is shorter than that.
    """
    chosen = first(texts, max(len(texts), 1) if n is None else n)
    rows = [tokenizer.encode(text.text)[:n_tokens] for text in chosen]
    for text, row in zip(chosen, rows, strict=True):
        if len(row) < n_tokens:
            raise TextError(
                f"the text {text.source}/{text.name} has {len(row)} tokens, "
                f"and {n_tokens} are needed"
            )
    return Passages(np.array(rows), tuple(f"{text.source}/{text.name}" for text in chosen))


def _python() -> list[Text]:
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))
    return [Text("python", name, topics[name]) for name in longest]


def _moby_dick() -> list[Text]:
    chapters = resources.files("kvstow.evaluate") / "data" / "moby_dick"
    files = sorted(chapters.iterdir(), key=lambda file: file.name)
    return [
        Text("moby-dick", file.name.removesuffix(".txt"), file.read_text(encoding="utf-8"))
        for file in files
    ]


_BUNDLED = dict(zip(SOURCES, (_python, _moby_dick), strict=True))

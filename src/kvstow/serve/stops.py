"""Stop words in a text that comes in pieces."""

from collections.abc import Sequence


class Stops:
    """Lets text through up to the first stop word, and holds back what may begin one.

    mlx-lm compares tokens, and the same word may be written in other tokens; this compares text.

    >>> stops = Stops(["###"])
    >>> stops.feed("a#"), stops.feed("#b"), stops.feed("####c"), stops.found
    ('a', '##b', '', True)

    Args:
        words: None of them empty.

    Attributes:
        found: Whether one came.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is known to come before every stop word."""
        if self.found:
            return ""
        text = self._held + text
        # The word that is whole first: so it does not matter how the text is cut.
        ends = [(at + len(word), at) for word in self._words if (at := text.find(word)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        n_held = max((_overlap(text, word) for word in self._words), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What was held back: no stop word came of it."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, word: str) -> int:
    """Characters at the end of `text` that `word` begins with."""
    return next(
        (n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0
    )

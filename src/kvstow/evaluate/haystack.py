"""A fact planted in a long text, and the words that ask for it.

The fact is a sentence, ``The secret code of <city> is <number>.``, and the question its
beginning, which the model completes. That serves a base model and an instruct model alike.
A line before the text says what will matter: of five facts at 1024 tokens SmolLM2 found
five with it and four without, where it missed the one that the text began with. Around
the fact is text that has nothing to do with it, another part of it for each fact.

All prompts of one length have exactly that many tokens, so they are rows of one batch
without padding.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstow.errors import TextError
from kvstow.evaluate.texts import Text

OPENING = "The text below gives the secret code of a city. Remember it.\n\n"
FACT = "The secret code of {city} is"
CITIES = (
    *("Amsterdam", "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Geneva"),
    *("Helsinki", "Lisbon", "London", "Madrid", "Moscow", "Nairobi", "Oslo", "Paris"),
    *("Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw"),
)
N_DIGITS = 5  # all different: a small model that copies 29744 drops one of its fours
_ENDS = re.compile(r"(?<=[.!?。！？])(?=\s)|(?<=\n)(?=\S)")  # noqa: RUF001  of other languages


@dataclass(frozen=True, slots=True)
class Prompt:
    """One planted fact.

    Attributes:
        length: Tokens of the whole prompt.
        depth: Where the fact was to be, 0 the beginning of the text and 1 its end.
        haystack: Tokens of the opening line and of the text with the fact in it.
        question: Tokens that follow it.
        number: What the model should answer.
    """

    length: int
    depth: float
    haystack: tuple[int, ...]
    question: tuple[int, ...]
    number: str

    @property
    def cell(self) -> tuple[int, float]:
        """Prompts of one cell are counted together."""
        return self.length, self.depth


class Haystack:
    """Plants facts in some texts.

    Args:
        tokenizer: Of the model that will read them.
        texts: Joined in order; what follows the end is the beginning.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[Text]) -> None:
        self._tokenizer = tokenizer
        self._opening = tuple(tokenizer.encode(OPENING))  # with a first token, where there is one
        whole = "\n\n".join(text.text.strip() for text in texts)
        self._sentences = [self._encode(part) for part in _ENDS.split(whole)]
        self.n_tokens = sum(map(len, self._sentences))

    def plant(self, length: int, depth: float, seed: int) -> Prompt:
        """One fact at `depth` in `length` tokens; one seed has one city, number and text.

        Raises:
            TextError: If the texts, or `length`, are too short.
        """
        rng = np.random.default_rng((length, seed))
        fact = FACT.format(city=rng.choice(CITIES))
        number = "".join(map(str, rng.permutation(10)[:N_DIGITS]))
        needle = self._encode(f" {fact} {number}.")
        question = self._encode(f"\n\n{fact}")
        room = length - len(self._opening) - len(needle) - len(question)
        if room < 1:
            raise TextError(
                f"a prompt of {length} tokens has no room for text: the fact and the words around "
                f"it take {length - room}"
            )
        hay, ends = self._text(room, int(rng.integers(len(self._sentences))))
        at = min(ends, key=lambda end: abs(end - depth * room))
        return Prompt(
            length, depth, (*self._opening, *hay[:at], *needle, *hay[at:]), question, number
        )

    def _text(self, n_tokens: int, start: int) -> tuple[tuple[int, ...], list[int]]:
        """Tokens from the `start`-th sentence on, and where the fact can go.

        Raises:
            TextError: If there are not so many.
        """
        if self.n_tokens < n_tokens:
            raise TextError(f"the texts have {self.n_tokens} tokens, and {n_tokens} are needed")
        tokens: list[int] = []
        ends = [0]
        for i in range(len(self._sentences)):
            tokens += self._sentences[(start + i) % len(self._sentences)]
            if len(tokens) >= n_tokens:
                break
            ends.append(len(tokens))
        return tuple(tokens[:n_tokens]), [*ends, n_tokens]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def about(texts: Sequence[Text], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What a row of results says of its texts; equal digests are equal prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.array([*prompt.haystack, *prompt.question], dtype="<i4").tobytes())
    sources = [text.source for text in texts]
    return {
        "n_texts": len(sources),
        "sources": {source: sources.count(source) for source in dict.fromkeys(sources)},
        "sha256": digest.hexdigest()[:16],
    }

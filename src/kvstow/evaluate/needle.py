"""Retrieval of a planted fact, by length of the prompt and depth of the fact in it.

The model reads the prompt (`kvstow.evaluate.haystack`) through the quantised cache and goes
on by its own choice, greedily; the fact is found if its digits are in what it writes.
Prompts are read in chunks: the first attends to exact keys and values (under turbo, and
unless the scheme says ``+stored``), all others to what is stored, and so do the last
token of the prompt, which goes alone as it does in mlx-lm, and the answer.

On a prefix hit the text is read once, its caches are copied, and the question is appended
to the copies, as a server does that keeps the caches of its prompts.

A model that does not find the facts without quantisation says nothing about an arm:
under `ENOUGH`, nothing is measured.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.harness import Running, check_control, feed, running, settle
from kvstow.evaluate.haystack import Haystack, Prompt
from kvstow.evaluate.statistics import digits, found_interval

LENGTHS, DEPTHS, PER_CELL, CHUNK_TOKENS = (512, 1024), (0.0, 0.25, 0.5, 0.75, 1.0), 2, 256
ENOUGH = 0.8
TOKENS_AT_ONCE = 8192  # of all prompts of a batch
ANSWER_TOKENS = 10  # a space, five digits of a token each, and what some models put before them
OnStep = Callable[[int, int], None]
_COUNTS = ("kv_bytes", "kv_bytes_bf16", "nonfinite_groups")


@dataclass(frozen=True, slots=True)
class Window:
    """The cells of a measurement, and how its prompts are read."""

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    per_cell: int = PER_CELL
    prefix_hit: bool = False
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def n_attended(self) -> int:
        """Most tokens that anything scored finds in the cache, before the answer."""
        return max(self.lengths) - 1

    def n_read(self, _: int) -> int:
        """Tokens that one arm reads, of however many texts."""
        return len(self.depths) * self.per_cell * sum(self.lengths)

    def as_dict(self) -> dict[str, Any]:
        """For a row of results."""
        return asdict(self) | {"lengths": list(self.lengths), "depths": list(self.depths)}

    def prompts(self, haystack: Haystack) -> list[Prompt]:
        """`per_cell` prompts for each length and depth.

        Raises:
            TextError: As `Haystack.plant`.
        """
        return [
            haystack.plant(length, depth, seed)
            for length in self.lengths
            for depth in self.depths
            for seed in range(self.per_cell)
        ]


@dataclass(frozen=True, slots=True)
class Answers:
    """What one arm wrote after each prompt.

    Attributes:
        about: Layers, bits and bytes of the arm.
        found: Whether the number is in it, ``(n,)``.
        nats: Negative log-probability of its first token, ``(n,)``; two arms with equal
            ones are the same arm.
    """

    about: dict[str, Any]
    found: np.ndarray
    nats: np.ndarray


class Reference:
    """The unquantised model on some prompts, and every arm against it.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        prompts: What it reads.
        window: How.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], window: Window
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = sorted(prompts, key=_rows)
        self.window = window

    def score(self, arm: Arm, *, on_step: OnStep = lambda *_: None) -> dict[str, Any]:
        """Run one arm; returns its row.

        Raises:
            EvaluationError: If the unquantised model finds too little, the arm quantised
                nothing, or the reference run again differs.
            UnsupportedModel: If the model cannot be stored so.
        """
        off = self._answers  # before the arm is attached
        self._check_enough(off.found)
        with running(self.model, arm) as run:
            answers = self._read(run, on_step)
        check_control(arm, answers.nats - off.nats)
        score, score_off = answers.found.mean(), off.found.mean()
        cells = self._cells(answers.found, off.found)
        return {
            **answers.about,
            "cells": cells,
            "score": digits(score),
            "interval_95": digits(found_interval(cells)),
            "score_off": digits(score_off),
            "relative": digits(score / score_off),
        }

    @cached_property
    def _answers(self) -> Answers:
        with running(self.model, Arm.parse("off")) as run:
            return self._read(run, lambda *_: None)

    def _check_enough(self, found: np.ndarray) -> None:
        if found.mean() >= ENOUGH:
            return
        missed = [
            f"{cell['found']} of {cell['n']} at length {cell['length']} depth {cell['depth']:g}"
            for cell in self._cells(found, found)
            if cell["found"] < cell["n"]
        ]
        raise EvaluationError(
            f"without quantisation this model finds {found.sum()} of {found.size} facts, and "
            f"{ENOUGH:.0%} are needed to say anything of an arm: {', '.join(missed)}; "
            "try shorter lengths or a larger model"
        )

    def _read(self, run: Running, on_step: OnStep) -> Answers:
        """Every prompt, in batches."""
        batches = list(_batches(self.prompts))
        parts = []
        for i, batch in enumerate(batches):
            caches = self._prefilled(run, batch)
            written, nats = _continue(run.model, caches, batch)
            texts = [self.tokenizer.decode(row) for row in written.tolist()]
            found = [_found(prompt, text) for prompt, text in zip(batch, texts, strict=True)]
            parts.append(Answers(run.about(caches), np.array(found), nats))
            on_step(i + 1, len(batches))
        counts = {
            key: sum(part.about[key] for part in parts)
            for key in _COUNTS
            if parts[0].about[key] is not None
        }
        return Answers(
            parts[0].about | counts,
            np.concatenate([part.found for part in parts]),
            np.concatenate([part.nats for part in parts]),
        )

    def _prefilled(self, run: Running, batch: list[Prompt]) -> list[Any]:
        """Caches of a batch that hold all of its prompts but the last token."""
        text = np.array([prompt.haystack for prompt in batch])
        question = np.array([prompt.question[:-1] for prompt in batch])
        caches = run.new()
        if self.window.prefix_hit:
            self._append(caches, text)
            hit = copy.deepcopy(caches)
            self._append(hit, question)
            return hit
        self._append(caches, np.concatenate([text, question], axis=1))
        return caches

    def _append(self, caches: list[Any], tokens: np.ndarray) -> None:
        size = self.window.chunk_tokens
        for at in range(0, tokens.shape[1], size):
            feed(self.model, caches, tokens[:, at : at + size])
            settle(caches)

    def _cells(self, found: np.ndarray, found_off: np.ndarray) -> list[dict[str, Any]]:
        rows: dict[tuple[int, float], list[int]] = {}
        for prompt, *counts in zip(self.prompts, found, found_off, strict=True):
            row = rows.setdefault(prompt.cell, [0, 0, 0])
            rows[prompt.cell] = [a + int(b) for a, b in zip(row, (1, *counts), strict=True)]
        return [
            {"length": length, "depth": depth, "n": n, "found": mine, "found_off": off}
            for (length, depth), (n, mine, off) in sorted(rows.items())
        ]


def _found(prompt: Prompt, text: str) -> bool:
    return prompt.number in text


def _rows(prompt: Prompt) -> tuple[int, int]:
    """Prompts that are alike in this can be rows of one batch, also on a prefix hit."""
    return prompt.length, len(prompt.question)


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    for (length, _), alike in groupby(prompts, key=_rows):
        rows, n = list(alike), max(1, TOKENS_AT_ONCE // length)
        yield from (rows[i : i + n] for i in range(0, len(rows), n))


def _continue(model: Any, caches: list[Any], batch: list[Prompt]) -> tuple[np.ndarray, np.ndarray]:
    """The most likely tokens, one after the other, and the nats of the first, ``(n,)``."""
    last = np.array([prompt.question[-1:] for prompt in batch])
    written: list[np.ndarray] = []
    nats = np.zeros(0)
    for _ in range(ANSWER_TOKENS):
        logits = np.array(feed(model, caches, last)[:, -1], dtype=np.float64)
        if not written:
            nats = np.log(np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1))
        last = logits.argmax(axis=-1)[:, None]
        written.append(last)
    return np.concatenate(written, axis=1), nats

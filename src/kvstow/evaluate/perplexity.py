"""Perplexity of texts that the model reads through the quantised cache.

A text goes in chunks, and each chunk attends to what is stored before it. The first
finds an empty cache: under turbo it attends to exact keys and values (unless the scheme
says ``+stored``), so its predictions are not scored. Scored are the tokens predicted
from the second chunk on, which is ``n_tokens - 1 - chunk_tokens`` of each text. With
chunks of one token the cache is written as a generated answer writes it, from the first
token (pseudo-decode). The unquantised model reads the same chunks in the same run.

Logits of a chunk become one number per token before the next chunk: exponentials in
float32, their sum in float64, in numpy. MLX's ``logsumexp`` adds in float32 on a CPU, one
after the other, and is off by up to 1e-3 nats, mostly downwards, where a vocabulary has
260,000 entries; this way it is 1e-8, and no slower.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.harness import Running, check_control, feed, running, settle
from kvstow.evaluate.statistics import digits, mean_interval
from kvstow.evaluate.texts import Passages

N_TOKENS, CHUNK_TOKENS = 512, 128
LOGITS_AT_ONCE = 2**26  # float32: 256 MB, and as much again in numpy
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Window:
    """How much of each text is read, and in what chunks.

    Raises:
        EvaluationError: If no token would be scored.
    """

    n_tokens: int = N_TOKENS
    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.n_scored < 1:
            raise EvaluationError(
                f"texts of {self.n_tokens} tokens in chunks of {self.chunk_tokens} have no "
                f"scored token: the first chunk is not scored, and must be at least 1 and "
                f"at most {self.n_tokens - 2}"
            )

    @property
    def n_scored(self) -> int:
        """Scored tokens of each text."""
        return self.n_tokens - 1 - self.chunk_tokens

    @property
    def n_attended(self) -> int:
        """Most tokens that anything scored finds in the cache."""
        return [begin for begin, _ in self.chunks()][-1]

    def n_read(self, n_texts: int) -> int:
        """Tokens that one arm reads."""
        return n_texts * self.n_tokens

    def as_dict(self) -> dict[str, Any]:
        """For a row of results."""
        return asdict(self)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each; the last token is predicted and not read."""
        last = self.n_tokens - 1
        for at in range(0, last, self.chunk_tokens):
            yield at, min(at + self.chunk_tokens, last)


@dataclass(frozen=True, slots=True)
class Scores:
    """One arm against the reference.

    Attributes:
        about: What was measured: the arm, its layers, bits and bytes.
        nats: Negative log-likelihood of each scored token, ``(n, n_scored)``.
        reference_nats: The same without quantisation.
    """

    about: dict[str, Any]
    nats: np.ndarray
    reference_nats: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """For a row of results."""
        change = (self.nats - self.reference_nats).mean(axis=1)
        return {
            **self.about,
            "ppl": digits(np.exp(self.nats.mean())),
            "ppl_off": digits(np.exp(self.reference_nats.mean())),
            "mean_change_nats": digits(change.mean()),
            "interval_95": digits(mean_interval(change)),
            "per_text_change_nats": digits(change),
            "n_scored_tokens": self.nats.size,
        }


class Reference:
    """The unquantised model on some passages, and every arm against it.

    Args:
        model: An mlx-lm model.
        passages: At least `window.n_tokens` tokens each.
        window: What is read and scored.

    Raises:
        TextError: If the passages are shorter than the window.
    """

    def __init__(self, model: Any, passages: Passages, window: Window) -> None:
        self.model = model
        self.window = window
        self.tokens = passages.first(window.n_tokens)

    def score(self, arm: Arm, *, on_step: OnStep = lambda *_: None) -> Scores:
        """Run one arm.

        Raises:
            EvaluationError: If it quantised nothing, or the reference run again differs.
            UnsupportedModel: If the model cannot be stored so.
        """
        reference = self._nats  # before the arm is attached
        with running(self.model, arm) as run:
            nats, caches = self._read(run, on_step)
            scores = Scores(run.about(caches), nats, reference)
        check_control(arm, nats - reference)
        return scores

    @cached_property
    def _nats(self) -> np.ndarray:
        with running(self.model, Arm.parse("off")) as run:
            return self._read(run, lambda *_: None)[0]

    def _read(self, run: Running, on_step: OnStep) -> tuple[np.ndarray, list[Any]]:
        """Nats of the scored tokens, and all caches of the run."""
        total = len(self._batches) * len(list(self.window.chunks()))
        nats: list[np.ndarray] = []
        caches: list[Any] = []
        done = 0
        for tokens in self._batches:
            own = run.new()
            caches += own
            columns = []
            for at, end in self.window.chunks():
                logits = feed(run.model, own, tokens[:, at:end])
                if at:
                    columns.append(_nats(logits, tokens[:, at + 1 : end + 1]))
                settle(own)
                on_step(done := done + 1, total)
            nats.append(np.concatenate(columns, axis=1))
        return np.concatenate(nats), caches

    @cached_property
    def _batches(self) -> list[np.ndarray]:
        """The texts, as many at a time as their logits allow."""
        with running(self.model, Arm.parse("off")) as run:
            vocabulary = feed(self.model, run.new(), self.tokens[:1, :1]).shape[-1]  # not computed
        n = max(1, LOGITS_AT_ONCE // (vocabulary * self.window.chunk_tokens))
        return [self.tokens[i : i + n] for i in range(0, len(self.tokens), n)]


def _nats(logits: mx.array, true: np.ndarray) -> np.ndarray:
    """Negative log-probability of the true tokens, ``(n, s)`` in float64."""
    rows = np.array(logits)
    best = rows.max(axis=-1)
    sums = np.array([_sum_of_exp(row, top) for row, top in zip(rows, best, strict=True)])
    picked = np.take_along_axis(rows, true[..., None], axis=-1)[..., 0]
    nats: np.ndarray = np.log(sums) + (best.astype(np.float64) - picked)
    return nats


def _sum_of_exp(logits: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Of one text: no second array as large as the logits of all."""
    total: np.ndarray = np.exp(logits - best[:, None]).sum(axis=-1, dtype=np.float64)
    return total

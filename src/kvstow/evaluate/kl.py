"""KL of a model under an arm against the same model unquantised.

Teacher-forced: the true tokens follow one at a time, so every step attends to
stored keys and values, and no arm writes its own text. The prefix before them is built
in one of two ways. ``convert``: it goes through the model at once in full precision and
its cache is converted, as the first append of a packed cache is (the seed's Gate 3).
``append``: it goes in token by token, each attending to what is stored before it;
harder, and what a long generated answer meets (pseudo-decode).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvstow.evaluate.arms import Arm
from kvstow.evaluate.harness import Running, check_control, feed, running, settle
from kvstow.evaluate.statistics import digits, summarise
from kvstow.evaluate.texts import Passages
from kvstow.integrations import attached

PREFIX_TOKENS, STEPS = 127, 32
Build = Literal["convert", "append"]
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Window:
    """What of each text is scored, and how its prefix gets into the cache."""

    prefix_tokens: int = PREFIX_TOKENS
    steps: int = STEPS
    build: Build = "convert"

    @property
    def n_tokens(self) -> int:
        """Tokens that a text must have: the last step's prediction needs a true token."""
        return self.prefix_tokens + self.steps + 1

    @property
    def n_attended(self) -> int:
        """Most tokens that anything scored finds in the cache."""
        return self.prefix_tokens + self.steps - 1

    def n_read(self, n_texts: int) -> int:
        """Tokens that one arm reads."""
        return n_texts * self.n_tokens

    def as_dict(self) -> dict[str, Any]:
        """For a row of results."""
        return asdict(self)

    def appends(self) -> int:
        """Calls of the model that one arm makes."""
        return self.steps + (self.prefix_tokens if self.build == "append" else 1)


@dataclass(frozen=True, slots=True)
class Scores:
    """One arm against the reference; arrays are ``(steps, n)``.

    Attributes:
        about: What was measured: the arm, its layers, bits and bytes.
        kl_nats: KL(reference || arm) of each step.
        agrees: Whether the most likely token is the reference's.
        true_nats: Change in the negative log-probability of the true token.
        true_probability: Change in the probability of the true token.
    """

    about: dict[str, Any]
    kl_nats: np.ndarray
    agrees: np.ndarray
    true_nats: np.ndarray
    true_probability: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """For a row of results."""
        return {
            **self.about,
            **summarise(self.kl_nats),
            "top1_agreement": digits(self.agrees.mean()),
            "rms_change_of_p": digits(np.sqrt(np.mean(self.true_probability**2))),
            "change_of_log_ppl": digits(self.true_nats.mean()),
        }


class Reference:
    """The unquantised model on some passages, and every arm against it.

    Args:
        model: An mlx-lm model.
        passages: At least `window.n_tokens` tokens each.
        window: What is scored.

    Raises:
        TextError: If the passages are shorter than the window.
    """

    def __init__(self, model: Any, passages: Passages, window: Window) -> None:
        self.model = model
        self.window = window
        tokens = passages.first(window.n_tokens)
        self.prefix, following = np.split(tokens, [window.prefix_tokens], axis=1)
        self.fed, self.true = following[:, :-1], following[:, 1:]

    def score(self, arm: Arm, *, on_step: OnStep = lambda *_: None) -> Scores:
        """Run one arm.

        Raises:
            EvaluationError: If it quantised nothing, or the reference run again differs.
            UnsupportedModel: If the model cannot be stored so.
        """
        reference = self._logits  # before the arm is attached
        with running(self.model, arm) as run:
            caches = self._prefilled(run, on_step)
            logits = self._steps(caches, on_step)
            steps = [
                _compare(exact, other, true)
                for exact, other, true in zip(reference, logits, self.true.T, strict=True)
            ]
            columns = map(np.stack, zip(*steps, strict=True))
            scores = Scores(run.about(caches), *columns)
        check_control(arm, scores.kl_nats)
        return scores

    @cached_property
    def perplexity(self) -> float:
        """Of the reference on the scored tokens."""
        nats = [_nats(logits, true) for logits, true in zip(self._logits, self.true.T, strict=True)]
        return float(np.exp(np.mean(nats)))

    @cached_property
    def _plain(self) -> list[Any]:
        with attached(self.model, "off"):
            caches: list[Any] = make_prompt_cache(self.model)
            self._append_prefix(caches, self.window.build, lambda *_: None)
        return caches

    @cached_property
    def _logits(self) -> list[np.ndarray]:
        """Float32 ``(n, vocab)`` per step."""
        with running(self.model, Arm.parse("off")) as run:
            return list(self._steps(run.take_over(self._plain), lambda *_: None))

    def _prefilled(self, run: Running, on_step: OnStep) -> list[Any]:
        if self.window.build == "convert" and run.converts:
            return run.take_over(self._plain)
        caches = run.new()
        self._append_prefix(caches, self.window.build, on_step)
        return caches

    def _append_prefix(self, caches: list[Any], build: Build, on_step: OnStep) -> None:
        size = 1 if build == "append" else self.window.prefix_tokens
        for at in range(0, self.window.prefix_tokens, size):
            feed(self.model, caches, self.prefix[:, at : at + size])
            settle(caches)
            on_step(at // size + 1, self.window.appends())

    def _steps(self, caches: list[Any], on_step: OnStep) -> Iterator[np.ndarray]:
        total = self.window.appends()
        for i, column in enumerate(self.fed.T):
            yield np.array(feed(self.model, caches, column[:, None])[:, -1])
            on_step(total - self.window.steps + i + 1, total)
        mx.clear_cache()


def compare(
    model: Any, passages: Passages, arms: Sequence[Arm | str], window: Window | None = None
) -> Iterator[Scores]:
    """Score each of `arms` against the unquantised model; see `Reference`."""
    reference = Reference(model, passages, window or Window())
    for arm in arms:
        yield reference.score(Arm.parse(arm))


def _compare(
    reference: np.ndarray, other: np.ndarray, true: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One step of `Scores`: KL, agreement, and the changes in nats and probability, ``(n,)``."""
    log_p, log_q = _log_softmax(reference), _log_softmax(other)
    p = np.exp(log_p)
    at = true[:, None]
    log_p_true, log_q_true = (np.take_along_axis(x, at, -1)[:, 0] for x in (log_p, log_q))
    return (
        (p * (log_p - log_q)).sum(axis=-1),
        log_p.argmax(axis=-1) == log_q.argmax(axis=-1),
        log_p_true - log_q_true,
        np.exp(log_q_true) - np.exp(log_p_true),
    )


def _nats(logits: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Negative log-probability of the true tokens, ``(n,)``."""
    picked: np.ndarray = np.take_along_axis(_log_softmax(logits), true[:, None], -1)[:, 0]
    return -picked


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    shifted: np.ndarray = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return shifted

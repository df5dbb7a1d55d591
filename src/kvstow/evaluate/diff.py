"""Greedy continuations of one prompt under two arms, and where they part.

Both arms read the prompt in the pieces in which mlx-lm's own generation does: all but its
last token in chunks, then that one. Up to the token at which the texts part both arms
have seen the same tokens, so their probabilities there can be compared; after it they
answer different questions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvstow.capacity import PREFILL_TOKENS
from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.harness import Running, feed, running, settle

OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token that differs. Pairs are in the order of the arms.

    Attributes:
        index: Of the token in both continuations.
        tokens: The one that each arm takes.
        probabilities: Per arm, those of the two tokens.
        gaps: Per arm, by how much its own token is ahead of the other's, in probability.
    """

    index: int
    tokens: tuple[int, int]
    probabilities: tuple[tuple[float, float], tuple[float, float]]
    gaps: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Diff:
    """Two continuations.

    Attributes:
        arms: What they were made under.
        tokens: Of each, the token that ends it included.
        parting: Where they part; None if they are equal.
    """

    arms: tuple[str, str]
    tokens: tuple[list[int], list[int]]
    parting: Parting | None

    def as_dict(self) -> dict[str, Any]:
        """The fields of ``kvstow eval diff --json``, all but the texts."""
        return asdict(self)


def diff(
    model: Any,
    prompt: Sequence[int],
    arms: tuple[Arm, Arm],
    *,
    max_tokens: int,
    ends: frozenset[int] = frozenset(),
    on_step: OnStep = lambda *_: None,
) -> Diff:
    """Continue `prompt` greedily under both arms.

    Args:
        model: The model.
        prompt: Its tokens.
        arms: The two.
        max_tokens: Most tokens of a continuation.
        ends: Tokens that end one.
        on_step: Told of each token that there is, of those that there may be.

    Raises:
        EvaluationError: If the prompt is empty.
        UnsupportedModel: If the model cannot be stored so.
    """
    if not len(prompt):
        raise EvaluationError("the prompt is empty")
    found = []
    for n, arm in enumerate(arms):
        with running(model, arm) as run:
            steps = []
            for token, log_p in _greedy(run, prompt, max_tokens):
                steps.append((token, log_p))
                on_step(n * max_tokens + len(steps), 2 * max_tokens)
                if token in ends:
                    break
        found.append(steps)
    return _compared((str(arms[0]), str(arms[1])), *found)


def _greedy(
    run: Running, prompt: Sequence[int], max_tokens: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Each next token, and the log-probabilities ``(vocab,)`` it was chosen by."""
    caches = run.new()
    tokens = np.asarray(prompt)[None]
    for at in range(0, tokens.shape[1] - 1, PREFILL_TOKENS):
        feed(run.model, caches, tokens[:, at : min(at + PREFILL_TOKENS, tokens.shape[1] - 1)])
        settle(caches)
    fed = tokens[:, -1:]
    for _ in range(max_tokens):
        logits = np.array(feed(run.model, caches, fed)[0, -1], np.float64)
        logits -= logits.max()
        token = int(logits.argmax())
        # float32: two arms of many steps over a large vocabulary are kept until compared
        yield token, (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        fed = np.array([[token]])


def _compared(
    arms: tuple[str, str],
    first: list[tuple[int, np.ndarray]],
    second: list[tuple[int, np.ndarray]],
) -> Diff:
    tokens = [token for token, _ in first], [token for token, _ in second]
    parting = None
    for i, ((a, log_p), (b, log_q)) in enumerate(zip(first, second, strict=False)):
        if a != b:
            p, q = (tuple(float(np.exp(x[t])) for t in (a, b)) for x in (log_p, log_q))
            parting = Parting(i, (a, b), ((p[0], p[1]), (q[0], q[1])), (p[0] - p[1], q[1] - q[0]))
            break
    return Diff(arms, tokens, parting)

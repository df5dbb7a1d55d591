"""KL of a model under a scheme against the same model unquantised.

Teacher-forced: a prefix goes through the model at once in full precision, its
cache is converted to the scheme, and the *true* tokens follow one at a time. So
every step attends to stored keys and values, and no arm writes its own text.
"""

import copy
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from kvstow.integrations import attached, usage
from kvstow.integrations.mlx_lm import convert
from kvstow.integrations.report import AttachReport, Fetch, KVUsage, fetch_of
from kvstow.scheme import Scheme

PREFIX_TOKENS, STEPS = 127, 32


def passages(tokenizer: Any, n: int, n_tokens: int = PREFIX_TOKENS + STEPS) -> np.ndarray:
    """The first `n_tokens` tokens of the `n` longest topics of Python's own pages."""
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:n]
    return np.array([tokenizer.encode(topics[name])[:n_tokens] for name in longest])


def compare(
    model: Any, tokens: np.ndarray, schemes: list[Scheme], *, fetch: Fetch = "auto"
) -> Iterator[tuple[AttachReport, KVUsage, np.ndarray]]:
    """Per scheme: what was attached, what its cache took, and the KL of each passage.

    Args:
        model: An mlx-lm model.
        tokens: ``(n, PREFIX_TOKENS + STEPS)``, passages of one length.
        schemes: The arms; ``off`` runs the reference again.
        fetch: Of the turbo arms.

    Yields:
        The KL in nats, float64 ``(n,)``, is the mean over the steps of a passage.
    """
    prefix, following = tokens[:, :PREFIX_TOKENS], tokens[:, PREFIX_TOKENS:]
    with attached(model, "off"):
        plain = make_prompt_cache(model)
        model(mx.array(prefix), cache=plain)
        mx.eval([c.state for c in plain])
        reference = _logits(model, copy.deepcopy(plain), following)
    for scheme in schemes:
        with attached(model, scheme, fetch=fetch_of(scheme, fetch)) as report:
            cache = convert(model, copy.deepcopy(plain))
            divergence = _divergence(reference, _logits(model, cache, following))
            yield report, usage(cache), divergence.mean(axis=0)


def _logits(model: Any, cache: list[Any], tokens: np.ndarray) -> np.ndarray:
    """Float32 ``(steps, n, vocab)`` of `tokens` ``(n, steps)``, fed one at a time."""
    steps = (model(mx.array(column[:, None]), cache=cache) for column in tokens.T)
    return np.stack([np.array(logits[:, -1].astype(mx.float32)) for logits in steps])


def _divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference || other) of each step and passage, ``(steps, n)``, in nats."""
    pairs = ((_log_softmax(a), _log_softmax(b)) for a, b in zip(reference, other, strict=True))
    return np.stack([(np.exp(p) * (p - q)).sum(axis=-1) for p, q in pairs])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    shifted: np.ndarray = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return shifted

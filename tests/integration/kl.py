"""KL of a model under a cache against the same model under another, as the reports define it.

A prefix goes through the model at once in full precision, its cache is converted,
and the true tokens follow one at a time. Passages have one length, so they are rows
of a batch.
"""

from pydoc_data.topics import topics

import mlx.core as mx
import numpy as np

PREFIX_TOKENS, STEPS = 127, 32


def passages(tokenizer, n, length=PREFIX_TOKENS + STEPS):
    """The first tokens of the `n` longest topics of Python's own documentation."""
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:n]
    return np.array([tokenizer.encode(topics[name])[:length] for name in longest])


def teacher_forced(model, cache, tokens):
    """Logits ``(steps, b, vocab)`` of `tokens` ``(b, steps)``, fed one at a time."""
    steps = (model(mx.array(column[:, None]), cache=cache) for column in tokens.T)
    return np.stack([np.array(logits[:, -1].astype(mx.float32)) for logits in steps])


def log_softmax(logits):
    """In float64."""
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def mean_kl(reference, other):
    """Mean over steps and passages of KL(reference || other), in nats."""
    total = 0.0
    for one, two in zip(reference, other, strict=True):
        p, q = log_softmax(one), log_softmax(two)
        total += float((np.exp(p) * (p - q)).sum(axis=-1).mean())
    return total / len(reference)

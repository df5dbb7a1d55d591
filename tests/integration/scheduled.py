"""A model's logits over a schedule of appends and trims."""

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as host

import kvstow
from tests.integration.tiny import tokens

SCHEDULE = (12, 5, 1, 1, -3, 2, 1, 40, 1, 1)  # a negative number trims


def run(model, cache=None, schedule=SCHEDULE, b=1):
    """Logits of every append of the schedule, joined: ``(b, tokens, vocab)``."""
    cache = host.make_prompt_cache(model) if cache is None else cache
    text, at, logits = tokens(200, b=b), 0, []
    for n in schedule:
        if n < 0:
            assert host.trim_prompt_cache(cache, -n) == -n
            at += n
        else:
            out = model(text[:, at : at + n], cache=cache)
            logits.append(np.array(out.astype(mx.float32)))
            at += n
    return np.concatenate(logits, axis=1)


def logits_of(model, fetch, scheme="turbo", schedule=SCHEDULE):
    """The same while the model is attached."""
    with kvstow.attached(model, scheme, fetch=fetch):
        return run(model, schedule=schedule)

"""A filled cache, saved and loaded, and how it goes on."""

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as host

from kvstow.integrations.mlx_lm import snapshots
from kvstow.snapshot import Snapshot
from tests.integration import tiny


class Tokenizer:
    """Of as many letters as said."""

    def __init__(self, n_tokens=3):
        self.n_tokens = n_tokens

    def get_vocab(self):
        return {chr(97 + i): i for i in range(self.n_tokens)}


def filled(model, n_tokens, step=64):
    """A cache of the model's with some tokens, read in steps."""
    cache = host.make_prompt_cache(model)
    tokens = tiny.tokens(n_tokens, seed=3)
    for start in range(0, n_tokens, step):
        model(tokens[:, start : start + step], cache=cache)
        mx.eval([c.state for c in cache])
    return cache, tokens[0].tolist()


def save(path, model, cache, tokens, **more):
    said = {"model": model, "tokenizer": Tokenizer()} | more
    return snapshots.save(path, cache, tokens, **said)


def load(path, model, tokenizer=None):
    with Snapshot(path) as snapshot:
        return snapshots.load(snapshot, model=model, tokenizer=tokenizer or Tokenizer())


def logits(model, cache):
    """Of a chunk, and of some steps."""
    found = [model(tiny.tokens(n, seed=n + 7), cache=cache) for n in (5, 1, 1, 2)]
    return [np.array(x.astype(mx.float32)) for x in found]


def assert_same(model, cache, loaded):
    for expected, got in zip(logits(model, cache), logits(model, loaded), strict=True):
        assert np.array_equal(expected, got)

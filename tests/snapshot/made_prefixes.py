"""Prefixes of made-up models, in numpy alone."""

import numpy as np

from kvstow import Policy
from kvstow.snapshot import Fingerprint, Manifest, Record, Source
from kvstow.snapshot.prefixes import HEAD_TOKENS, files, key_of

HEAD = tuple(range(HEAD_TOKENS))
MODEL = Fingerprint("made", ("full 1 x 2",), "w" * 32)
RECURRENT = Fingerprint("made", ("arrays 1x4",), "w" * 32)
POLICY, TOKENIZER = Policy.of("off"), "t" * 32


def tokens_of(*more):
    return np.array([*HEAD, *more], np.uint32)


def manifest_of(tokens, model=MODEL, tokenizer=TOKENIZER, policy=POLICY):
    n = len(tokens)
    layer = Record("full", {"offset": n}) if model is MODEL else Record("arrays", {"size": 1})
    return Manifest(model, tokenizer, policy, (layer,), n)


def sources_of(tokens, model=MODEL):
    """Keys and values that are made of the tokens, or a state."""
    x = np.repeat(tokens.astype(np.float32), 2).reshape(1, 1, -1, 2)
    held = {"tokens": Source("U32", tokens.shape, lambda: tokens)}
    of_keys, state = {"0.keys": x, "0.values": -x}, {"0.0": x[:, :, :2].reshape(1, 4)}
    arrays = of_keys if model is MODEL else state
    return held | {k: Source("F32", v.shape, lambda v=v: v) for k, v in arrays.items()}


def add(directory, tokens, model=MODEL, **more):
    return directory.add(tokens, manifest_of(tokens, model, **more), sources_of(tokens, model))


def key(model=MODEL, tokenizer=TOKENIZER, policy=POLICY):
    return key_of(model, tokenizer, policy)


def read(directory, found):
    """What is in the file that was found; None if it turned out to be nothing."""

    def arrays(snapshot):
        return {name: snapshot.read(name) for name in snapshot.tensors}

    return None if found is None else directory.take(found.entry, arrays)


def paths(directory):
    return [x.path for x in files.entries(directory.root)]

"""What a model's keys and values look like, layer by layer, and how hard its keys are.

A plain cache is filled with some texts in full precision, and described. Nothing is
quantised but copies of the keys, so this takes one prefill. What the figures mean:

norms                 mean length of a vector, and that of keys over that of values
outlier channels      channels of a head whose mean magnitude is more than 8 times that
                      of the head's median channel
group range           mean of max - min in a group of 32, over the RMS of its vector
key error             RMS of (stored - exact), over the RMS of the keys
hardness              RMS of (stored - exact) at 4 bits, over the RMS distance of the keys
                      from their mean: see `integrations.mlx_lm.hardness`
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from kvstow.codec import mlx as codec
from kvstow.errors import EvaluationError
from kvstow.evaluate.harness import feed, settle
from kvstow.evaluate.texts import Passages
from kvstow.integrations.mlx_lm import hardness, members
from kvstow.integrations.mlx_lm.attach import plain_caches
from kvstow.scheme import GROUP_SIZE

N_TOKENS = 160
OUTLIER = 8.0


@dataclass(frozen=True, slots=True)
class Window:
    """How much of each text is read."""

    n_tokens: int = N_TOKENS

    def n_read(self, n_texts: int) -> int:
        """Tokens that one arm reads."""
        return n_texts * self.n_tokens

    def as_dict(self) -> dict[str, Any]:
        """For a row of results."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One cache of the model; see the top of this module for the figures."""

    index: int
    key_norm: float
    value_norm: float
    ratio: float
    outlier_channels: int
    channels: int
    key_group_range: float
    value_group_range: float
    key_error_4bit: float
    key_error_8bit: float
    hardness: float


@dataclass(frozen=True, slots=True)
class Profile:
    """All layers of a model that `attach` can quantise.

    Attributes:
        layers: One per plain cache, in order, sliding or not.
        n_caches: Of the model; those that are no plain cache are not described.
        at_attach: The hardness that `attach` finds, on random tokens.
    """

    layers: tuple[LayerProfile, ...]
    n_caches: int
    at_attach: float

    @property
    def hardness(self) -> float:
        """Of the hardest layer."""
        return max(layer.hardness for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """For a row of results."""
        return {
            "layers": [len(self.layers), self.n_caches],
            "hardness": self.hardness,
            "hardness_at_attach": self.at_attach,
            "threshold": hardness.LIMIT,
            "hard_keys": self.hardness > hardness.LIMIT,
            "layers_profile": [asdict(layer) for layer in self.layers],
        }


def profile(model: Any, passages: Passages) -> Profile:
    """Describe what `model` stores when it reads `passages`.

    Raises:
        EvaluationError: If it has no attention layer whose keys can be coded.
    """
    caches = plain_caches(model)
    feed(model, caches, passages.tokens)
    plain = {i: members.plain(c) for i, c in enumerate(caches)}
    stored = {i: c for i, c in plain.items() if c is not None and not c.empty()}
    pairs = {i: c.keys_and_values() for i, c in stored.items()}
    dims = sorted({int(keys.shape[-1]) for keys, _ in pairs.values()})
    if not dims or any(dim % GROUP_SIZE for dim in dims):
        found = f"its keys have {dims} elements" if dims else "it has no attention layer"
        raise EvaluationError(
            f"a profile needs keys in whole groups of {GROUP_SIZE} elements, and {found}"
        )
    settle([*stored.values()])
    layers = tuple(_layer(i, *pair) for i, pair in pairs.items())
    at_attach = hardness.of_model(model, partial(plain_caches, model))[hardness.BITS]
    return Profile(layers, len(caches), _digits(max(at_attach.values())))


def _layer(index: int, keys: mx.array, values: mx.array) -> LayerProfile:
    keys, values = (x.astype(mx.float32) for x in (keys, values))
    errors = {bits: _error(keys, bits) for bits in (4, 8)}
    k, v = np.array(keys), np.array(values)
    key_norm, value_norm = _norm(k), _norm(v)
    return LayerProfile(
        index=index,
        key_norm=_digits(key_norm),
        value_norm=_digits(value_norm),
        ratio=_digits(key_norm / value_norm) if value_norm else 0.0,
        outlier_channels=_outliers(k),
        channels=k.shape[1] * k.shape[3],
        key_group_range=_digits(_group_range(k)),
        value_group_range=_digits(_group_range(v)),
        key_error_4bit=_digits(errors[4]),
        key_error_8bit=_digits(errors[8]),
        hardness=_digits(hardness.hardness(keys)),
    )


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x, axis=-1).mean())


def _outliers(x: np.ndarray) -> int:
    magnitude = np.abs(x).mean(axis=(0, 2))  # (h, d)
    return int((magnitude > OUTLIER * np.median(magnitude, axis=-1, keepdims=True)).sum())


def _group_range(x: np.ndarray) -> float:
    """Of vectors that are not zero; 0 if all are, or their size has no whole groups."""
    rms = np.sqrt((x * x).mean(axis=-1))
    if x.shape[-1] % GROUP_SIZE or not rms.any():
        return 0.0
    ranges = np.ptp(x.reshape(*x.shape[:-1], -1, GROUP_SIZE), axis=-1).mean(axis=-1)
    return float((ranges[rms > 0] / rms[rms > 0]).mean())


def _error(keys: mx.array, bits: int) -> float:
    packed = codec.encode_keys(keys, bits=bits, guard=True)
    error = codec.decode_keys(packed, bits=bits, dtype=keys.dtype) - keys
    size = float((keys * keys).sum())
    return float(np.sqrt(float((error * error).sum()) / size)) if size else 0.0


def _digits(x: float) -> float:
    return round(float(x), 6)

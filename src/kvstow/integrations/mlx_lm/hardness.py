"""How hard a model's keys are to store in few bits, measured on the model itself.

Softmax ignores whatever all keys of a head share, so the *hardness* of a layer is how far
rounding moves its keys, over how far apart they are::

    RMS(stored key - key) / RMS(key - mean key)

where the mean is over the tokens of a text, per channel. It has no unit and does not change
when a model scales its keys, queries or values. A model is as hard as its hardest layer at
4 bits. Models whose keys carry a large constant, such as a
bias, in a few channels are hard: those channels set the step of a group, and the others
drown in it. ``kvstow eval profile`` measures it on text, `attach` on some fixed random
tokens, which come out alike (``benchmarks/results/profile.jsonl``).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import ReferenceType, ref

import mlx.core as mx
import numpy as np

from kvstow.capacity import LayerShape
from kvstow.codec import mlx as codec
from kvstow.integrations.mlx_lm import members, probe
from kvstow.scheme import GROUP_SIZE, HEAD_DIMS, KEY_BITS, Affine, Scheme, Turbo

BITS = 4  # at which models are compared
LIMIT = 0.5
N_TOKENS = 32
EASY_BITS = 8  # no model is hard at this width

Hardness = Mapping[int, Mapping[int, float]]
_known: dict[int, tuple[ReferenceType[Any], Hardness]] = {}  # by id: a model has no hash


def hardness(keys: mx.array, bits: int = BITS) -> float:
    """Of one layer's exact keys ``(b, h, t, d)``, stored in `bits` bits each.

    Keys that are all alike say nothing, and count 0.
    """
    keys = keys.astype(mx.float32)
    packed = codec.encode_keys(keys, bits=bits, guard=True)
    error = codec.decode_keys(packed, bits=bits, dtype=keys.dtype) - keys
    spread = _rms(keys - keys.mean(axis=2, keepdims=True))
    return _rms(error) / spread if spread else 0.0


def of_model(model: Any, new_caches: Callable[[], list[Any]]) -> Hardness:
    """Key bits below 8 to index of a plain cache to hardness, on `N_TOKENS` random tokens.

    Measured once; the answer is kept as long as the model lives.

    Args:
        model: The model, with weights.
        new_caches: Makes the caches that it has when it is not attached.
    """
    key = id(model)
    if key not in _known:
        _known[key] = ref(model, lambda _: _known.pop(key, None)), _measure(model, new_caches)
    return _known[key][1]


def advice(
    model: Any,
    scheme: Scheme,
    layers: Mapping[int, LayerShape],
    new_caches: Callable[[], list[Any]],
) -> tuple[str, ...]:
    """What to say of `scheme` on `model`: nothing, or that its keys need more bits.

    Nothing is computed for 8 bits, and for a model without weights.

    Args:
        model: The model.
        scheme: What it is attached to.
        layers: Index and shape of the caches that the scheme applies to.
        new_caches: See `of_model`.
    """
    bits = key_bits(scheme)
    if bits >= EASY_BITS or getattr(model, "is_skeleton", False):
        return ()
    of_layer = of_model(model, new_caches)[bits]
    hard = {i: of_layer[i] for i in layers if of_layer.get(i, 0) > LIMIT}
    if not hard:
        return ()
    worst = max(hard, key=hard.__getitem__)
    head_dim = layers[worst].key_dim
    better = gentler(scheme, head_dim)
    cost = better.bits_per_value(head_dim) - scheme.bits_per_value(head_dim)
    return (
        f"{scheme} may garble this model's text: its keys are hard to store in {bits} bits "
        f"({len(hard)} of {len(layers)} layers; in cache {worst} rounding moves them by "
        f"{hard[worst]:.2f} of what tells them apart, where {LIMIT} is the limit). "
        f"{better} keeps them, for {cost:.3g} bits more per value",
    )


def key_bits(scheme: Scheme) -> int:
    """Bits of a key's code; 16 where keys are not coded."""
    if isinstance(scheme, Turbo):
        return scheme.key_bits
    return scheme.bits if isinstance(scheme, Affine) else 16


def gentler(scheme: Scheme, head_dim: int) -> Scheme:
    """The nearest scheme with 8 bits for keys that can store `head_dim`."""
    if isinstance(scheme, Turbo):
        return replace(scheme, key_bits=EASY_BITS)
    if head_dim not in HEAD_DIMS and isinstance(scheme, Affine):
        return replace(scheme, bits=EASY_BITS)
    return Turbo()


def _measure(model: Any, new_caches: Callable[[], list[Any]]) -> Hardness:
    vocabulary = int(probe.fill(model, new_caches(), (1,)).shape[-1])
    tokens = np.random.default_rng(0).integers(0, vocabulary, (1, N_TOKENS))
    caches = new_caches()
    model(mx.array(tokens), cache=caches)
    held = {i: members.plain(cache) for i, cache in enumerate(caches)}
    keys = {
        i: cache.keys_and_values()[0]
        for i, cache in held.items()
        if cache is not None and not cache.empty()
    }
    mx.eval(list(keys.values()))
    return {
        bits: {i: hardness(x, bits) for i, x in keys.items() if x.shape[-1] % GROUP_SIZE == 0}
        for bits in KEY_BITS
        if bits < EASY_BITS
    }


def _rms(x: mx.array) -> float:
    return float(mx.sqrt((x * x).mean()))

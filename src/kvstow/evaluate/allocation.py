"""A policy for one model at a budget of bytes: bits go where they lower KL most.

Near the reference KL is a quadratic form of the change in logits. Errors of different
layers, and of keys and of values, are independent, so their costs add, and each falls with
the squared error of what is stored::

    KL(policy)  ~  sum over layers of  keys(width of keys) + values(width of values)

Two arms of each layer measure one point of both (`probes`), and the squared errors of the
layer's own keys and values at every width say the rest (`costs`). Then bytes are spent one
step at a time where KL falls most for them (`allocate`), which is optimal for costs that add
up to the last step. What KL really is, a measurement must say.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from kvstow.capacity import LayerShape
from kvstow.codec import mlx as codec
from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.harness import feed
from kvstow.evaluate.texts import Passages
from kvstow.integrations.mlx_lm import probe
from kvstow.integrations.mlx_lm.attach import plain_caches
from kvstow.policy import Policy, Rule
from kvstow.scheme import KEY_BITS, VALUE_BITS, Turbo

# In the middle of what is chosen from, so that no width is far from a measured one.
KEY_PROBE, VALUE_PROBE = 5, 3
Errors = Mapping[int, float]  # width of a code to mean squared error


class Cost(NamedTuple):
    """One layer under one scheme: bytes of a token, and what it adds to KL."""

    n_bytes: int
    nats: float


@dataclass(frozen=True, slots=True)
class Layer:
    """What the widths of one layer cost.

    Attributes:
        shape: Of its cache.
        keys: Width of keys to nats.
        values: Width of values to nats.
    """

    shape: LayerShape
    keys: Errors
    values: Errors

    def under(self, scheme: Turbo) -> Cost:
        """The layer under `scheme`."""
        n_bytes = self.shape.n_kv_heads * scheme.bytes_per_token(self.shape.key_dim)
        return Cost(n_bytes, self.keys[scheme.key_bits] + self.values[scheme.value_bits])


def full_layers(model: Any) -> list[int]:
    """Indices of the caches that a policy chooses for.

    Raises:
        UnsupportedModel: If the model does not run on its own caches.
    """
    return list(_full_shapes(model))


def probes(layers: Iterable[int], options: Turbo) -> list[Arm]:
    """The arms whose KL `costs` needs: of every layer, one for its keys and one for its values.

    Args:
        layers: Indices of caches.
        options: The candidates' own, such as ``+search``; its widths are not used.
    """
    keys = replace(options, key_bits=KEY_PROBE, value_bits=8)
    values = replace(options, key_bits=8, value_bits=VALUE_PROBE)
    return [Arm(scheme, layer=i) for i in layers for scheme in (keys, values)]


def costs(
    model: Any, passages: Passages, nats: Mapping[str, float], options: Turbo
) -> dict[int, Layer]:
    """What every width costs in each layer of `model`.

    Args:
        model: The model, attached to nothing.
        passages: What its caches are filled with, to see its keys and values.
        nats: Mean KL of each of `probes`, by the arm's spelling.
        options: As for `probes`.

    Raises:
        UnsupportedModel: If the model does not run on its own caches.
    """
    shapes = _full_shapes(model)
    caches = plain_caches(model)
    feed(model, caches, passages.tokens)
    found = {}
    for i, shape in shapes.items():
        key_arm, value_arm = (nats[str(arm)] for arm in probes([i], options))
        key_array, value_array = caches[i].keys_and_values()
        key_errors, value_errors = _errors(key_array, value_array, options)
        keys = {b: key_arm * e / key_errors[KEY_PROBE] for b, e in key_errors.items()}
        of_values = max(value_arm - keys[8], 0.0)
        values = {b: of_values * e / value_errors[VALUE_PROBE] for b, e in value_errors.items()}
        found[i] = Layer(shape, keys, values)
    return found


def _full_shapes(model: Any) -> dict[int, LayerShape]:
    """A sliding window does not grow, so bytes per token say nothing about it."""
    shapes = probe.attention_layers(model, plain_caches(model))
    return {i: shape for i, shape in shapes.items() if shape.kind == "full"}


def candidates(options: Turbo) -> list[Turbo]:
    """Every pair of widths."""
    return [replace(options, key_bits=k, value_bits=v) for k in KEY_BITS for v in VALUE_BITS]


def allocate(layers: Mapping[int, Layer], schemes: Sequence[Turbo], bytes_per_token: int) -> Policy:
    """The policy that takes at most `bytes_per_token` and, as costs add, has the least KL.

    Every layer begins at the scheme of fewest bytes. Each step then takes the scheme that
    lowers KL most for its bytes, of those that still fit.

    Raises:
        EvaluationError: If even the fewest bytes are too many.
    """
    paths = {i: _hull({s: layer.under(s) for s in schemes}) for i, layer in layers.items()}
    chosen = {i: path[0] for i, path in paths.items()}
    left = bytes_per_token - sum(cost.n_bytes for _, cost in chosen.values())
    if left < 0:
        raise EvaluationError(
            f"{bytes_per_token} bytes per token are too few for these layers: "
            f"the least is {bytes_per_token - left}"
        )
    steps = []
    for i, path in paths.items():
        for (_, a), (scheme, b) in pairwise(path):
            steps.append((_slope(a, b), i, b.n_bytes - a.n_bytes, (scheme, b)))
    stopped = set()  # a later step of a layer begins where its last one ends
    for _, i, n_bytes, taken in sorted(steps, key=lambda step: step[:2]):
        if i not in stopped and n_bytes <= left:
            chosen[i] = taken
            left -= n_bytes
        else:
            stopped.add(i)
    return policy_of({i: scheme for i, (scheme, _) in chosen.items()})


def predicted(layers: Mapping[int, Layer], policy: Policy) -> Cost:
    """What `policy` takes and adds, as costs add."""
    under = []
    for i, layer in layers.items():
        scheme = policy.of_layer(i, layer.shape.kind)
        if isinstance(scheme, Turbo):
            under.append(layer.under(scheme))
    return Cost(sum(c.n_bytes for c in under), sum(c.nats for c in under))


def policy_of(schemes: Mapping[int, Turbo]) -> Policy:
    """The policy under which each layer takes its scheme; the most common is the default."""
    (default, _), *others = Counter(schemes.values()).most_common()
    rules = [
        Rule(scheme, frozenset(i for i, s in schemes.items() if s == scheme))
        for scheme, _ in sorted(others, key=lambda other: str(other[0]))
    ]
    return Policy(default, tuple(rules))


def _hull(costs_of: Mapping[Turbo, Cost]) -> list[tuple[Turbo, Cost]]:
    """Schemes on the lower convex hull of KL over bytes, from the fewest bytes up."""
    hull: list[tuple[Turbo, Cost]] = []
    for scheme, cost in sorted(costs_of.items(), key=lambda x: (x[1], str(x[0]))):
        if hull and cost.nats >= hull[-1][1].nats:
            continue
        while len(hull) > 1 and _slope(hull[-2][1], cost) <= _slope(hull[-2][1], hull[-1][1]):
            hull.pop()
        hull.append((scheme, cost))
    return hull


def _slope(a: Cost, b: Cost) -> float:
    return (b.nats - a.nats) / (b.n_bytes - a.n_bytes)


def _errors(keys: mx.array, values: mx.array, options: Turbo) -> tuple[Errors, Errors]:
    """Mean squared error of a layer's own keys and values at every width."""
    how: dict[str, Any] = {"guard": True, "search": options.search}
    key_errors, value_errors = {}, {}
    for bits in KEY_BITS:
        packed = codec.encode_keys(keys, bits=bits, **how)
        key_errors[bits] = _mse(codec.decode_keys(packed, bits=bits), keys)
    for bits in VALUE_BITS:
        stored = codec.encode_values(values, bits=bits, **how)
        head_dim = int(values.shape[-1])
        value_errors[bits] = _mse(codec.decode_values(stored, bits=bits, head_dim=head_dim), values)
    return key_errors, value_errors


def _mse(decoded: mx.array, exact: mx.array) -> float:
    error = decoded - exact.astype(mx.float32)
    return float((error * error).mean())

"""Which path each layer's attention takes to what is stored: eager, deferred or fused.

What the model's own code takes is found out by `probe`; whether the kernels do what the layers
need, by asking their self-check for one token at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_lm.models import cache as host

from kvstow.attention import fused, selfcheck
from kvstow.attention.tasks import AttendTask, EncodeTask, PrefillTask, Task
from kvstow.capacity import LayerShape
from kvstow.errors import UnsupportedModel
from kvstow.integrations.mlx_lm import deferred, members, probe
from kvstow.integrations.mlx_lm.cache import DeferredKVCache, FusedKVCache, PackedKVCache
from kvstow.integrations.mlx_lm.rotating import (
    DeferredRotatingKVCache,
    FusedRotatingKVCache,
    PackedRotatingKVCache,
)
from kvstow.kernels.plan import MOST_STEP_TOKENS
from kvstow.policy import spans
from kvstow.scheme import Affine, Scheme, Turbo

NewCaches = Callable[[], list[Any]]
_FULL = {"eager": PackedKVCache, "deferred": DeferredKVCache, "fused": FusedKVCache}
_SLIDING = {
    "eager": PackedRotatingKVCache,
    "deferred": DeferredRotatingKVCache,
    "fused": FusedRotatingKVCache,
}
HOOKED = frozenset({"deferred", "fused"})  # paths through `deferred.attention`
_OTHER_MASKS = "masks given as arrays that say more than where rows and windows begin"


@dataclass(frozen=True, slots=True)
class Paths:
    """What was chosen.

    Attributes:
        fetch: The fastest path that a layer under turbo takes; ``"host"`` if there is none.
        reason: Why it is not the one that auto prefers, or what it leaves to another path.
        layers: Index to the path of each layer under a scheme.
        reasons: Index to why a layer is not fused, of those that could be on this machine.
        warnings: What a user should know.
    """

    fetch: str
    reason: str
    layers: dict[int, str]
    reasons: dict[int, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def choose(
    model: Any,
    schemes: Mapping[int, Scheme],
    shapes: Mapping[int, LayerShape],
    fetch: str,
    new_caches: NewCaches,
) -> Paths:
    """The path of each layer.

    Args:
        model: The model.
        schemes: Index to scheme of the quantised layers.
        shapes: Index to what they store.
        fetch: What was asked for.
        new_caches: Makes the model's own caches.

    Raises:
        UnsupportedModel: If the path asked for does not work on this model, or here.
    """
    turbo = {i: scheme for i, scheme in schemes.items() if isinstance(scheme, Turbo)}
    if not turbo:
        if fetch != "auto":
            said = ", ".join(sorted({str(scheme) for scheme in schemes.values()})) or "off"
            raise UnsupportedModel(f"fetch {fetch!r} is an option of turbo, the scheme is {said}")
        _check_runs(model, schemes, "host", new_caches)
        return Paths("host", "", dict.fromkeys(schemes, "host"))
    if fetch == "fused" and (why := fused.why_no_device()):
        raise UnsupportedModel(f"fused kernels need a GPU: {why}")
    # No option changes what is probed, and some delay it.
    bare = dict(schemes) | {i: Turbo(s.key_bits, s.value_bits) for i, s in turbo.items()}
    why = ""
    if fetch != "eager":
        caches = under(bare, dict.fromkeys(bare, "deferred"), new_caches())
        why, heads = probe.deferred_refusal(model, caches, len(turbo))
        if not why:
            return _hooked(schemes, turbo, shapes, fetch, heads)
        if fetch != "auto":
            raise UnsupportedModel(f"this model cannot take packed windows: {why}")
    _check_runs(model, bare, "eager", new_caches)
    return Paths("eager", why, _paths(schemes, dict.fromkeys(turbo, "eager")))


def under(schemes: Mapping[int, Scheme], paths: Mapping[int, str], caches: list[Any]) -> list[Any]:
    """`caches` with fresh ones at the indices of `schemes`."""
    return [
        members.with_plain(c, _new_cache(schemes[i], paths[i], members.plain(c)))
        if i in schemes
        else c
        for i, c in enumerate(caches)
    ]


def _hooked(
    schemes: Mapping[int, Scheme],
    turbo: Mapping[int, Turbo],
    shapes: Mapping[int, LayerShape],
    fetch: str,
    heads: set[deferred.Heads],
) -> Paths:
    """Of a model that takes packed windows: fused where that was not ruled out, and works.

    Raises:
        UnsupportedModel: If fused was asked for and a layer cannot be.
    """
    if fetch == "deferred" or fused.why_no_device():
        return Paths("deferred", "", _paths(schemes, dict.fromkeys(turbo, "deferred")))
    if fetch == "auto" and (why := fused.why_not_unasked()):
        return Paths("deferred", why, _paths(schemes, dict.fromkeys(turbo, "deferred")))
    failed = {i: outcome for i, s in turbo.items() if (outcome := _failed(s, shapes[i], heads))}
    reasons = {i: outcome.why for i, outcome in failed.items()}
    if fetch == "fused" and reasons:
        raise UnsupportedModel(f"fused kernels cannot be used: {next(iter(reasons.values()))}")
    layers = _paths(schemes, {i: "deferred" if i in failed else "fused" for i in turbo})
    warnings = tuple(dict.fromkeys(outcome.warning for outcome in failed.values()))
    if len(failed) == len(turbo):
        return Paths("deferred", next(iter(reasons.values())), layers, reasons, warnings)
    served = {i: s for i, s in turbo.items() if i not in failed}
    short = [i for i, s in served.items() if not _takes_prompts(s, shapes[i], heads)]
    return Paths("fused", _said(short, len(served)), layers, reasons, warnings)


def _said(short: list[int], n_fused: int) -> str:
    """What kernels take, and what they leave; layers `short` have some for few tokens only."""
    few = f"up to {MOST_STEP_TOKENS} tokens"
    if not short:
        return f"steps of any length; deferred: {_OTHER_MASKS}"
    if len(short) == n_fused:
        return f"steps of {few}; deferred: longer ones, and {_OTHER_MASKS}"
    where = f"{few} in layers {spans(short)}"
    return f"steps of any length, {where}; deferred: longer ones there, and {_OTHER_MASKS}"


def _failed(
    scheme: Turbo, shape: LayerShape, heads: set[deferred.Heads]
) -> selfcheck.Outcome | None:
    """The first kernel of a layer that did not pass, for steps of one token."""
    tasks: list[Task] = []
    for h in _of_layer(scheme, shape, heads):
        about, group = (h.key_bits, h.value_bits, h.head_dim, h.dtype), h.n_heads // h.n_kv_heads
        step = AttendTask(*about, group, 1, ragged=False, sinks=h.sinks)
        tasks += [step, EncodeTask(*about, scheme.search)]
        if fused.can_append():  # checked now, but nothing hangs on it: there is another way
            selfcheck.outcome(EncodeTask(*about, scheme.search, append=True))
            if not scheme.search:
                selfcheck.outcome(replace(step, stores=True))
    outcomes = map(selfcheck.outcome, tasks)
    return next((outcome for outcome in outcomes if not outcome.passed), None)


def _takes_prompts(scheme: Turbo, shape: LayerShape, heads: set[deferred.Heads]) -> bool:
    """Whether a layer has kernels for steps of many tokens; they are checked when one is met."""
    return all(
        fused.has_kernel(
            PrefillTask(h.key_bits, h.value_bits, h.head_dim, h.dtype, ragged=False, sinks=h.sinks)
        )
        for h in _of_layer(scheme, shape, heads)
    )


def _of_layer(scheme: Turbo, shape: LayerShape, heads: set[deferred.Heads]) -> list[deferred.Heads]:
    widths = scheme.key_bits, scheme.value_bits, shape.key_dim, shape.n_kv_heads
    return sorted(
        (h for h in heads if (h.key_bits, h.value_bits, h.head_dim, h.n_kv_heads) == widths),
        key=lambda h: (h.n_heads, h.dtype, h.sinks),
    )


def _paths(schemes: Mapping[int, Scheme], of_turbo: Mapping[int, str]) -> dict[int, str]:
    return {i: of_turbo.get(i, "host") for i in schemes}


def _new_cache(scheme: Scheme, path: str, plain: Any) -> Any:
    """A cache of `scheme` in the place of `plain`.

    Raises:
        TypeError: If there is no such cache.
    """
    if isinstance(scheme, Affine):
        return host.QuantizedKVCache(group_size=scheme.group_size, bits=scheme.bits)
    if not isinstance(scheme, Turbo):
        raise TypeError(f"no cache for {scheme!r}")
    if isinstance(plain, host.RotatingKVCache):
        return _SLIDING[path](scheme, plain.max_size, plain.keep)
    return _FULL[path](scheme)


def _check_runs(
    model: Any, schemes: Mapping[int, Scheme], path: str, new_caches: NewCaches
) -> None:
    paths = dict.fromkeys(schemes, path)
    if schemes and (error := probe.refusal(model, under(schemes, paths, new_caches()))):
        said = ", ".join(sorted({str(scheme) for scheme in schemes.values()}))
        raise UnsupportedModel(f"this model does not run on {said} caches: {error}")

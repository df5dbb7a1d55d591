"""`attach`: the hook that makes mlx-lm create caches under a scheme.

mlx-lm asks ``model.make_cache()`` wherever it needs a prompt cache. Attaching
sets that attribute on the instance to a `CacheFactory`; detaching takes it
away, so the attribute itself is the only state.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

from mlx_lm.models import cache as host

from kvstow.capacity import LayerShape, check_layer
from kvstow.errors import UnsupportedModel
from kvstow.integrations.mlx_lm import deferred, hardness, members, probe
from kvstow.integrations.mlx_lm.paths import HOOKED, choose, under
from kvstow.integrations.report import AttachReport, LayerReport
from kvstow.policy import Policy
from kvstow.scheme import Affine, Off, Scheme


@dataclass(frozen=True, eq=False)
class CacheFactory(deferred.Owner):
    """What ``model.make_cache`` becomes.

    Attributes:
        model: A weak reference to the model, which owns this factory.
        report: What was decided, layer by layer.
        own: The instance's own ``make_cache`` that this one replaced, if it had one.
    """

    model: ReferenceType[Any]
    report: AttachReport
    own: Any

    def __call__(self) -> list[Any]:
        """A prompt cache: the quantised layers under the scheme, the others as before."""
        if self.is_hooked:
            deferred.install(self)  # the copy of an attached model comes here first
        paths = {layer.index: layer.fetch for layer in self.report.layers}
        return under(self._schemes, paths, _plain(self.model(), self.own))

    def __deepcopy__(self, memo: dict[int, Any]) -> "CacheFactory":
        """The factory of the copied model."""
        model = self.model()
        return CacheFactory(ref(memo.get(id(model), model)), self.report, self.own)

    def convert(self, caches: list[Any]) -> list[Any]:
        """The tokens of plain `caches`, in a prompt cache like those this factory makes.

        A layer that is not quantised keeps its very cache: deepcopy it first where both
        prompt caches are used on.
        """
        pairs = enumerate(zip(self(), caches, strict=True))
        return [
            members.converted(old, new) if i in self._schemes else old for i, (new, old) in pairs
        ]

    @property
    def is_hooked(self) -> bool:
        """Whether windows are on their way to `deferred.attention`."""
        return self.report.fetch in HOOKED

    @property
    def _schemes(self) -> dict[int, Scheme]:
        return {layer.index: layer.scheme for layer in self.report.layers if layer.quantised}


def attach(model: Any, policy: Policy, fetch: str) -> AttachReport:
    """See `kvstow.attach`.

    Raises:
        UnsupportedModel: As there; the model is unchanged then.
        PolicyError: As there.
    """
    filled, kept = _decide(model, policy)
    shapes = {i: shape for i, shape in filled.items() if not kept[i]}
    schemes = {i: policy.of_layer(i, shape.kind) for i, shape in shapes.items()}
    new_caches = partial(plain_caches, model)
    paths = choose(model, schemes, shapes, fetch, new_caches)
    kinds = {i: shape.kind for i, shape in filled.items()}
    reports = tuple(
        LayerReport(
            i,
            schemes.get(i, Off()),
            reason,
            paths.layers.get(i, "host"),
            kinds.get(i),
            paths.reasons.get(i, ""),
        )
        for i, reason in enumerate(kept)
    )
    warnings = paths.warnings + tuple(
        warning
        for scheme in policy.schemes
        for warning in hardness.advice(
            model, scheme, {i: s for i, s in shapes.items() if schemes[i] == scheme}, new_caches
        )
    )
    report = AttachReport(policy.uniform or policy, paths.fetch, paths.reason, reports, warnings)
    factory = CacheFactory(ref(model), report, _own_maker(model))
    restore(model, factory if schemes else None)
    return report


def detach(model: Any) -> None:
    """See `kvstow.detach`."""
    restore(model, None)


def attachment(model: Any) -> CacheFactory | None:
    """The factory that `attach` set on this model, if any."""
    factory = vars(model).get("make_cache")
    return factory if isinstance(factory, CacheFactory) else None


def restore(model: Any, factory: CacheFactory | None) -> None:
    """Put `factory` in the place of whatever is attached to the model now."""
    before = attachment(model)
    if factory is not None:
        if factory.is_hooked:
            deferred.install(factory)
        model.make_cache = factory
    elif before is not None:
        if before.own is not None:
            model.make_cache = before.own
        else:
            del model.make_cache
    if before is not None and before is not factory:
        deferred.remove(before)


def convert(model: Any, caches: list[Any]) -> list[Any]:
    """See `CacheFactory.convert`; `caches` themselves where nothing is attached."""
    factory = attachment(model)
    return caches if factory is None else factory.convert(caches)


def plain_caches(model: Any) -> list[Any]:
    """The caches that `model` has when it is not attached.

    Raises:
        UnsupportedModel: If `model` is not one of mlx-lm's.
    """
    return _plain(model, _own_maker(model))


def _plain(model: Any, own: Any) -> list[Any]:
    caches: list[Any]
    if own is not None:
        caches = own()
    elif hasattr(type(model), "make_cache"):
        caches = type(model).make_cache(model)
    elif hasattr(model, "layers"):
        caches = [host.KVCache() for _ in model.layers]
    else:
        name = type(model).__name__
        raise UnsupportedModel(f"expected an mlx-lm model, got {name} without layers")
    return caches


def _own_maker(model: Any) -> Any:
    """The ``make_cache`` of the instance itself, without ours."""
    before = attachment(model)
    return vars(model).get("make_cache") if before is None else before.own


def _decide(model: Any, policy: Policy) -> tuple[dict[int, LayerShape], list[str]]:
    """Shapes of the plain caches; per cache, why it stays as it is, empty if it does not.

    Raises:
        UnsupportedModel: If a scheme cannot store a layer that takes it, or no layer takes one.
        PolicyError: If a rule names a layer that has no scheme.
    """
    caches = plain_caches(model)
    if isinstance(policy.uniform, Off):
        return {}, ["the scheme is off"] * len(caches)
    _refuse_mla(model, policy)
    probe.refuse_stage(model)
    filled = probe.attention_layers(model, caches)
    policy.check({i: shape.kind for i, shape in filled.items()})
    reasons = [_why_kept(c) if i not in filled else "" for i, c in enumerate(caches)]
    for i, layer in filled.items():
        scheme = policy.of_layer(i, layer.kind)
        if not (why := _why_plain(scheme, layer)):
            check_layer(scheme, layer)
        reasons[i] = why
    if all(reasons):
        raise UnsupportedModel(
            f"{policy} would apply to no layer of this model: {'; '.join(sorted(set(reasons)))}"
        )
    return filled, reasons


def _refuse_mla(model: Any, policy: Policy) -> None:
    """Latent attention stores one joint vector per token, not keys and values per head.

    Raises:
        UnsupportedModel: If the model's configuration has a ``kv_lora_rank``.
    """
    if rank := getattr(probe.text_args(model), "kv_lora_rank", None):
        raise UnsupportedModel(
            f"{policy} stores keys and values per head; this model has multi-head latent "
            f"attention (kv_lora_rank {rank}), whose cache is compressed already"
        )


def _why_plain(scheme: Scheme, layer: LayerShape) -> str:
    """Why a layer with keys and values stays plain; empty if it does not."""
    if isinstance(scheme, Off):
        return "the policy says off"
    if isinstance(scheme, Affine) and layer.kind == "sliding":
        return f"mlx-lm's affine cache has no sliding window, as of {layer.window} tokens here"
    return ""


def _why_kept(cache: Any) -> str:
    name = type(cache).__name__
    if isinstance(cache, host.RotatingKVCache) and type(cache) not in members.PLAIN:
        return f"{name} is a sliding window of its own kind"
    if isinstance(cache, host.ArraysCache):
        return "recurrent layer has a state, not keys and values"
    if isinstance(cache, host.CacheList):
        if sum(type(member) in members.PLAIN for member in cache.caches) > 1:
            return "several plain caches in one layer, and nothing says which attention reads"
        return "; ".join(sorted({_why_kept(member) for member in cache.caches}))
    if isinstance(cache, host.ChunkedKVCache):
        return f"chunked attention of {cache.chunk_size} tokens keeps its cache"
    if type(cache) in members.PLAIN:
        return "the model stores nothing in this cache"
    return f"{name} is not a cache that a scheme is known for"

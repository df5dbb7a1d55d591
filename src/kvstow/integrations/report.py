"""What `attach` did, and what a cache holds: plain values, for people and for JSON."""

from dataclasses import dataclass
from typing import Any, Literal

from kvstow.policy import Policy, spans
from kvstow.scheme import Scheme, Turbo

Fetch = Literal["auto", "eager", "deferred", "fused"]


def has_turbo(scheme: Scheme | Policy) -> bool:
    """Whether some layer may be under turbo."""
    return any(isinstance(s, Turbo) for s in Policy.of(scheme).schemes)


def fetch_of(scheme: Scheme | Policy, fetch: Fetch) -> Fetch:
    """`fetch` where there is turbo, and ``"auto"`` for the others, which have no choice."""
    return fetch if has_turbo(scheme) else "auto"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One entry of the model's prompt cache.

    Attributes:
        index: Position in the list that the model's ``make_cache`` returns.
        scheme: Of the layer's keys and values; off for a layer that stays as it was. A recurrent
            part of the layer always stays.
        reason: Why it stays; empty for a quantised layer.
        fetch: How the layer's attention reaches what is stored: ``"eager"``, ``"deferred"`` or
            ``"fused"`` under turbo, ``"host"`` where the cache is the host's own.
        kind: ``"full"`` or ``"sliding"`` where attention has keys and values that a scheme could
            store, or None.
        fetch_reason: Why the layer is not fused, on a machine with kernels; empty if it is.
    """

    index: int
    scheme: Scheme
    reason: str
    fetch: str
    kind: str | None = None
    fetch_reason: str = ""

    @property
    def quantised(self) -> bool:
        """Whether the layer's cache is under a scheme."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class AttachReport:
    """Which layers are quantised, which keep their own cache, and why.

    Attributes:
        scheme: What was asked for: a policy, if layers differ.
        fetch: The path of the layers under turbo, ``"eager"``, ``"deferred"`` or ``"fused"``;
            ``"host"`` if there is none. Where some layers could not be fused, they are deferred.
        fetch_reason: Why that path, when ``"auto"`` could not take the faster one; of fused,
            which steps it leaves to deferred.
        layers: One report per cache of the model.
        warnings: Why the scheme is likely not what was wanted; `attach` warns of the same.
    """

    scheme: Scheme | Policy
    fetch: str
    fetch_reason: str
    layers: tuple[LayerReport, ...]
    warnings: tuple[str, ...] = ()

    @property
    def n_quantised(self) -> int:
        """Layers under a scheme."""
        return sum(layer.quantised for layer in self.layers)

    @property
    def schemes(self) -> dict[Scheme, list[int]]:
        """Scheme to the indices of the layers under it."""
        under: dict[Scheme, list[int]] = {}
        for layer in self.layers:
            if layer.quantised:
                under.setdefault(layer.scheme, []).append(layer.index)
        return under

    @property
    def kept(self) -> dict[str, list[int]]:
        """Reason to the indices of the layers that stay as they were for it."""
        reasons: dict[str, list[int]] = {}
        for layer in self.layers:
            if not layer.quantised:
                reasons.setdefault(layer.reason, []).append(layer.index)
        return reasons

    def as_dict(self) -> dict[str, Any]:
        """``{"quantised": int, "kept": int, "reasons": {reason: [index, ...]}}``.

        With ``"schemes": {scheme: [index, ...]}`` under a policy. Where layers are fused or
        failed to be, with ``"paths": {path: [index, ...]}`` and ``"path_reasons": {reason:
        [index, ...]}`` of those that failed.
        """
        n_kept = len(self.layers) - self.n_quantised
        counts = {"quantised": self.n_quantised, "kept": n_kept, "reasons": self.kept}
        if isinstance(self.scheme, Policy):
            counts["schemes"] = {str(scheme): at for scheme, at in self.schemes.items()}
        if self.fetch == "fused" or self.not_fused:
            paths: dict[str, list[int]] = {}
            for layer in self.layers:
                if layer.quantised:
                    paths.setdefault(layer.fetch, []).append(layer.index)
            counts |= {"paths": paths, "path_reasons": self.not_fused}
        return counts

    @property
    def not_fused(self) -> dict[str, list[int]]:
        """Reason to the indices of the layers that the kernels could not serve for it."""
        reasons: dict[str, list[int]] = {}
        for layer in self.layers:
            if layer.fetch_reason:
                reasons.setdefault(layer.fetch_reason, []).append(layer.index)
        return reasons

    def __str__(self) -> str:
        name = "policy" if isinstance(self.scheme, Policy) else self.scheme
        lines = [f"{name}: {self.n_quantised} of {len(self.layers)} layers, {self.fetch}"]
        if self.fetch_reason:
            lines.append(f"  {self.fetch}: {self.fetch_reason}")
        if self.fetch == "fused":
            for reason, indices in self.not_fused.items():
                lines.append(f"  deferred {len(indices)} ({spans(indices)}): {reason}")
        if isinstance(self.scheme, Policy):
            for scheme, indices in self.schemes.items():
                lines.append(f"  {scheme} {len(indices)} ({spans(indices)})")
        if sliding := [x.index for x in self.layers if x.quantised and x.kind == "sliding"]:
            lines.append(f"  sliding windows {len(sliding)} ({spans(sliding)})")
        for reason, indices in self.kept.items():
            lines.append(f"  kept {len(indices)} ({spans(indices)}): {reason}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Bytes and tokens of a prompt cache, as allocated now.

    Attributes:
        kv_bytes: Allocated by all layers' caches, unused capacity included.
        kv_bytes_bf16: What two-byte caches of the same capacity would take.
        tokens: Tokens held.
        capacity_tokens: Tokens that fit before the largest cache grows.
        nonfinite_groups: Stored groups that the model filled with NaN or inf.
    """

    kv_bytes: int
    kv_bytes_bf16: int
    tokens: int
    capacity_tokens: int
    nonfinite_groups: int

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than bf16 the cache is; 1.0 for an empty one."""
        return self.kv_bytes_bf16 / self.kv_bytes if self.kv_bytes else 1.0

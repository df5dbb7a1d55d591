"""What `attach` did, and what a cache holds: plain values, for people and for JSON."""

from dataclasses import dataclass
from typing import Any, Literal

from kvstow.scheme import Scheme, Turbo

Fetch = Literal["auto", "eager", "deferred"]


def fetch_of(scheme: Scheme, fetch: Fetch) -> Fetch:
    """`fetch` for a turbo scheme, and ``"auto"`` for the others, which have no choice."""
    return fetch if isinstance(scheme, Turbo) else "auto"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One entry of the model's prompt cache.

    Attributes:
        index: Position in the list that the model's ``make_cache`` returns.
        quantised: Whether the layer's cache is under the scheme.
        reason: Why it is not; empty for a quantised layer.
        fetch: How the layer's attention reaches what is stored: ``"eager"`` or
            ``"deferred"`` under turbo, ``"host"`` where the cache is the host's own.
    """

    index: int
    quantised: bool
    reason: str
    fetch: str


@dataclass(frozen=True, slots=True)
class AttachReport:
    """Which layers are quantised, which keep their own cache, and why.

    Attributes:
        scheme: What was asked for.
        fetch: The path of the quantised layers: ``"eager"``, ``"deferred"`` or ``"host"``.
        fetch_reason: Why that path, when ``"auto"`` could not take the faster one.
        layers: One report per cache of the model.
        warnings: Why the scheme is likely not what was wanted; `attach` warns of the same.
    """

    scheme: Scheme
    fetch: str
    fetch_reason: str
    layers: tuple[LayerReport, ...]
    warnings: tuple[str, ...] = ()

    @property
    def n_quantised(self) -> int:
        """Layers under the scheme."""
        return sum(layer.quantised for layer in self.layers)

    @property
    def kept(self) -> dict[str, list[int]]:
        """Reason to the indices of the layers that stay as they were for it."""
        reasons: dict[str, list[int]] = {}
        for layer in self.layers:
            if not layer.quantised:
                reasons.setdefault(layer.reason, []).append(layer.index)
        return reasons

    def as_dict(self) -> dict[str, Any]:
        """``{"quantised": int, "kept": int, "reasons": {reason: [index, ...]}}``."""
        n_kept = len(self.layers) - self.n_quantised
        return {"quantised": self.n_quantised, "kept": n_kept, "reasons": self.kept}

    def __str__(self) -> str:
        lines = [f"{self.scheme}: {self.n_quantised} of {len(self.layers)} layers, {self.fetch}"]
        if self.fetch_reason:
            lines.append(f"  {self.fetch}: {self.fetch_reason}")
        for reason, indices in self.kept.items():
            lines.append(f"  kept {len(indices)} ({_ranges(indices)}): {reason}")
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


def _ranges(indices: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    spans: list[list[int]] = []
    for i in indices:
        if spans and spans[-1][1] == i - 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)

"""What the memory of a context depends on: plain values, whichever framework they come from."""

from dataclasses import dataclass, field
from typing import Literal

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
Kind = Literal["full", "plain", "sliding", "bounded", "recurrent"]
KINDS: tuple[Kind, ...] = ("full", "plain", "sliding", "bounded", "recurrent")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's cache.

    Args:
        kind: ``full`` grows with the context and is stored under the scheme, ``plain``
            grows and stays as it is under every scheme, ``sliding`` stops growing at
            `window` tokens and is stored under a turbo scheme, ``bounded`` stops growing and
            stays as it is, ``recurrent`` has a state of `state_bytes` and no tokens.
        n_kv_heads: Heads of keys and of values.
        key_dim: Elements of one key.
        value_dim: Elements of one value.
        window: Tokens that a sliding or bounded layer keeps; 0 for others.
        state_bytes: Bytes of a recurrent layer's state; 0 for others.
        index: Of the cache among the model's, as in `AttachReport.layers`; -1 if nobody asked.
    """

    kind: Kind
    n_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    state_bytes: int = 0
    index: int = field(default=-1, compare=False)  # where it is, not what it is


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the memory of a running model depends on, beside its weights.

    Args:
        layers: The caches that the model fills.
        n_heads: Query heads.
        hidden_size: Width of the residual stream.
        ffn_size: Width of the feed-forward layer, over all experts of one token.
        vocab_size: Tokens in the vocabulary.
        max_tokens: Longest context that the model allows; None if it does not say.
        dtype_bytes: Bytes of one element of the activations, and of a plain cache.
    """

    layers: tuple[LayerShape, ...]
    n_heads: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_tokens: int | None
    dtype_bytes: int

    def of_kind(self, *kinds: Kind) -> list[LayerShape]:
        """List the layers of some kinds."""
        return [layer for layer in self.layers if layer.kind in kinds]

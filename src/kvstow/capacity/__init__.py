"""What a context costs on a model.

`LayerShape` and `ModelShape` say what it depends on; `cost`, `bytes_per_token`
and `max_tokens` do the arithmetic. No framework is needed for that; the
adapters read the shape of a model, such as `kvstow.integrations.mlx_lm.read_shape`.
"""

from kvstow.capacity.budget import (
    PREFILL_TOKENS,
    Cost,
    Fit,
    bytes_per_token,
    check_layer,
    cost,
    max_tokens,
)
from kvstow.capacity.shapes import DTYPE_BYTES, KINDS, LayerShape, ModelShape

__all__ = [
    "DTYPE_BYTES",
    "KINDS",
    "PREFILL_TOKENS",
    "Cost",
    "Fit",
    "LayerShape",
    "ModelShape",
    "bytes_per_token",
    "check_layer",
    "cost",
    "max_tokens",
]

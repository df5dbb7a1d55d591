"""What a context costs on a model, from its config alone.

`read_shape` turns a config.json into layers that hold keys and values;
`cost`, `bytes_per_token` and `max_tokens` do the arithmetic. No weights and no
framework are needed.
"""

from kvstow.capacity.budget import (
    PREFILL_TOKENS,
    STEP_TOKENS,
    Cost,
    Fit,
    bytes_per_token,
    check_scheme,
    cost,
    max_tokens,
)
from kvstow.capacity.families import FAMILIES
from kvstow.capacity.shapes import DTYPE_BYTES, LayerShape, ModelShape, read_shape

__all__ = [
    "DTYPE_BYTES",
    "FAMILIES",
    "PREFILL_TOKENS",
    "STEP_TOKENS",
    "Cost",
    "Fit",
    "LayerShape",
    "ModelShape",
    "bytes_per_token",
    "check_scheme",
    "cost",
    "max_tokens",
    "read_shape",
]

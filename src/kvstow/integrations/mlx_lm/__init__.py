"""kvstow inside mlx-lm: caches of its protocol, and the hook that makes it use them."""

from kvstow.integrations.mlx_lm.attach import attach, attachment, convert, detach, restore
from kvstow.integrations.mlx_lm.batch import DeferredBatchKVCache, PackedBatchKVCache
from kvstow.integrations.mlx_lm.cache import DeferredKVCache, FusedKVCache, PackedKVCache
from kvstow.integrations.mlx_lm.rotating import (
    DeferredRotatingKVCache,
    FusedRotatingKVCache,
    PackedBatchRotatingKVCache,
    PackedRotatingKVCache,
)
from kvstow.integrations.mlx_lm.shape import read_shape
from kvstow.integrations.mlx_lm.usage import usage

__all__ = [
    "DeferredBatchKVCache",
    "DeferredKVCache",
    "DeferredRotatingKVCache",
    "FusedKVCache",
    "FusedRotatingKVCache",
    "PackedBatchKVCache",
    "PackedBatchRotatingKVCache",
    "PackedKVCache",
    "PackedRotatingKVCache",
    "attach",
    "attachment",
    "convert",
    "detach",
    "read_shape",
    "restore",
    "usage",
]

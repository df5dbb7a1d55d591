"""kvstow: the KV cache of a language model in few bits.

Nothing here imports an array framework.
"""

from kvstow.blas import use_fast_blas
from kvstow.errors import (
    KvstowError,
    KvstowWarning,
    MissingDependency,
    ModelFileError,
    ModelNotFound,
    PolicyError,
    PromptError,
    SchemeError,
    SnapshotError,
    UnsupportedModel,
)
from kvstow.integrations import (
    AttachReport,
    KVUsage,
    attach,
    attached,
    detach,
    load_cache,
    save_cache,
    usage,
)
from kvstow.models import load
from kvstow.policy import Policy
from kvstow.scheme import Scheme

__all__ = [
    "AttachReport",
    "KVUsage",
    "KvstowError",
    "KvstowWarning",
    "MissingDependency",
    "ModelFileError",
    "ModelNotFound",
    "Policy",
    "PolicyError",
    "PromptError",
    "Scheme",
    "SchemeError",
    "SnapshotError",
    "UnsupportedModel",
    "attach",
    "attached",
    "detach",
    "load",
    "load_cache",
    "save_cache",
    "usage",
    "use_fast_blas",
]

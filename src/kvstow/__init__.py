"""kvstow: the KV cache of a language model in few bits.

Nothing here imports an array framework.
"""

from kvstow.errors import (
    KvstowError,
    MissingDependency,
    ModelFileError,
    ModelNotFound,
    PromptError,
    SchemeError,
    UnsupportedModel,
)
from kvstow.scheme import Scheme

__all__ = [
    "KvstowError",
    "MissingDependency",
    "ModelFileError",
    "ModelNotFound",
    "PromptError",
    "Scheme",
    "SchemeError",
    "UnsupportedModel",
]

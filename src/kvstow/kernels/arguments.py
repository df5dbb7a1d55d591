"""The arguments of kernels as C structures, for whoever launches them with device addresses.

Field for field the structures of ``cuda/decode_shape.cuh`` and ``cuda/group.cuh``, which say
what each one is.
"""

import ctypes

_POINTERS = (
    "key_codes",
    "key_scales",
    "key_zeros",
    "value_codes",
    "value_scales",
    "queries",
    "centroids",
    "signs",
    "sinks",
    "starts",
    "lengths",
    "output",
    "sums",
    "weights",
    "arrivals",
    "new_keys",
    "new_values",
    "boundaries",
)
DECODE_COUNTS = (
    "batch",
    "n_kv_heads",
    "group",
    "n_queries",
    "capacity",
    "length",
    "row_blocks",
    "n_splits",
    "chunk",
    "window",
    "stored",
)


class DecodeArgs(ctypes.Structure):
    """``kvstow::DecodeArgs``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in DECODE_COUNTS),
        ("scale_log2", ctypes.c_float),
    )


class EncodeArgs(ctypes.Structure):
    """``kvstow::EncodeArgs``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", *_POINTERS[:5])),
        ("signs", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("boundaries", "centroids")),
        *((name, ctypes.c_void_p) for name in ("key_errors", "value_errors")),
        *(
            (name, ctypes.c_uint32)
            for name in ("n_kv_heads", "n_tokens", "n_vectors", "capacity", "position")
        ),
        *((name, ctypes.c_uint64) for name in ("batch_step", "head_step", "token_step")),
    )

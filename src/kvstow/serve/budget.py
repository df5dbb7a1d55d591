"""How much memory there is for caches, and what the caches of a request take."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvstow.capacity import ModelShape, bytes_per_token, cost, max_tokens
from kvstow.policy import Policy
from kvstow.scheme import Off, Scheme, Turbo
from kvstow.store import STEP_TOKENS

SHARE = 0.8  # of the memory that is free; the rest is for everything that nobody counts
_GPU_KEYS = ("max_recommended_working_set_size", "free_memory", "total_memory", "memory_size")
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Stored:
    """A model whose caches a request fills.

    Attributes:
        shape: Of the model.
        scheme: Of its caches.
    """

    shape: ModelShape
    scheme: Scheme | Policy

    def cache_bytes(self, n_tokens: int) -> int:
        """Bytes of the caches of one request of `n_tokens`, at most.

        Caches grow in steps from wherever rows were put together, so up to one step is added.
        """
        if not n_tokens:
            return 0
        needed = cost(self.shape, self.scheme, n_tokens + STEP_TOKENS - 1)
        n_bytes = needed.cache_bytes + needed.fixed_bytes
        if any(isinstance(s, Turbo) and s.start_tokens for s in Policy.of(self.scheme).schemes):
            n_bytes += STEP_TOKENS * bytes_per_token(self.shape, Off())  # the same, while plain
        return n_bytes


def default_budget(stored: Stored, weight_bytes: int, memory_bytes: int) -> int:
    """Bytes for caches: what weights and the work of one long prompt leave.

    Args:
        stored: The model.
        weight_bytes: Of all models.
        memory_bytes: That may be taken in all.

    Returns:
        0 or less where not even the weights fit.
    """
    room, on_gpu = memory_bytes - weight_bytes, mx.default_device() != mx.cpu
    longest = max_tokens(stored.shape, stored.scheme, max(room, 0), on_gpu=on_gpu).tokens
    if longest is None:  # nothing grows with the context
        return room
    return room - cost(stored.shape, stored.scheme, longest, on_gpu=on_gpu).working_bytes


def usable_memory() -> int:
    """Bytes that this process may take on the device that computes."""
    return int(SHARE * (free_memory() or _host_memory()))


def free_memory() -> int | None:
    """Bytes free on the device that computes; None for a GPU of which MLX does not say.

    A Mac's GPU says what it should hold at most, free or not.
    """
    if mx.default_device() == mx.cpu:
        return _host_memory()
    info: dict[str, Any] = mx.device_info()
    return next((info[key] for key in _GPU_KEYS if isinstance(info.get(key), int)), None)


def _host_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(free, int(_CGROUP.read_text("ascii")))
    except (OSError, ValueError):  # no limit, or "max"
        return free

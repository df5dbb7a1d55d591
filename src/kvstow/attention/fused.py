"""Attention and encoding by the kernels where they can do it, and by MLX's operations elsewhere.

A step goes to the kernel if its window is marked for it, MLX computes on a GPU, there is a
kernel for so many query tokens, its mask is one whose meaning is known (see `masks`), and the
kernel has passed its self-check on this machine. Everything else is `mlx.attend`, and counted
with the reason. Nothing here raises where that would not, but for a token on its way that
cannot be stored: see `arrival`.
"""

import threading
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import mlx.core as mx
import numpy as np

from kvstow.attention import selfcheck
from kvstow.attention.masks import sight_of
from kvstow.attention.mlx import attend as attend_deferred
from kvstow.attention.notices import warn
from kvstow.attention.parity import say
from kvstow.attention.step import Last, Step, likeness, shape, stored_at
from kvstow.attention.tasks import AttendTask, EncodeTask, PrefillTask, Task
from kvstow.attention.window import ALIGNED_TOKENS, PackedWindow
from kvstow.codec import mlx as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.kernels import backend as kernels
from kvstow.kernels.calls import NAMES
from kvstow.kernels.plan import MOST_STEP_TOKENS
from kvstow.scheme import Turbo

KERNEL = "kernel"
Planes = tuple[PackedKeys, PackedValues]


@dataclass(slots=True)
class Call:
    """One call of the attention kernel.

    Attributes:
        tokens: How many of the planes' tokens are data, or the rows of a ragged batch.
        scores: Scale, window and sinks.
        stores: Which token of each row the kernel is to store; None: none.
    """

    tokens: int | kernels.Rows
    scores: kernels.Scores
    stores: int | None = None


# Making a value of a frozen dataclass takes longer than finding one: see `kernels.calls`.
_attend_task = lru_cache(maxsize=256)(AttendTask)
_prefill_task = lru_cache(maxsize=256)(PrefillTask)
_encode_task = lru_cache(maxsize=256)(EncodeTask)
_scores = lru_cache(maxsize=256)(kernels.Scores)

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def why_no_device() -> str:
    """Why no kernel can run here; empty if one can."""
    if not kernels.name():
        return "mlx has no CUDA or Metal back-end with a GPU here"
    return "" if codec.on_gpu() else "mlx's default device is the CPU"


def why_not_unasked() -> str:
    """Why kernels that can run here are only used where they are asked for; empty if they are."""
    if kernels.name() == "metal":
        return "kernels for Metal have not been timed on any Mac: fetch 'fused' asks for them"
    return ""


def has_kernel(task: Task) -> bool:
    """Whether there is a kernel for it on the GPU that MLX uses, right or wrong."""
    try:
        task.name(kernels.device())
    except Exception:  # as in a self-check: no step fails for it
        return False
    return True


def can_append() -> bool:
    """Whether the GPU that MLX uses has kernels that write into planes, right or wrong."""
    return not why_no_device() and kernels.can_append()


def counts() -> Counter[str]:
    """Calls of attention over windows marked for the kernel, in this process.

    Under `KERNEL` those that it took, and under a reason those that it did not.
    """
    with _lock:
        return Counter(_counts)


def attend(
    queries: mx.array,
    window: PackedWindow,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """See `reference.attend`; by the kernel where `window` is marked for it and it can."""
    if not window.fused:
        return attend_deferred(queries, window.settled(), scale=scale, mask=mask, sinks=sinks)
    taken: Step | str | None = _last.planned(queries, window, scale, mask, sinks)
    if taken is None:
        taken = _planned(queries, window, scale, mask, sinks)
    if isinstance(taken, Step):
        try:
            output = taken.run(queries, window.aligned(ALIGNED_TOKENS), sinks)
        except Exception as error:
            taken, _last.steps = _uncallable(error), ()
        else:
            _count(KERNEL)
            return output
    _count(taken)
    return attend_deferred(queries, window.settled(), scale=scale, mask=mask, sinks=sinks)


_last = Last()


def _planned(
    queries: mx.array,
    window: PackedWindow,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> Step | str:
    """The kernel's call for this layer and those to come, or why there is none."""
    call = plan_call(queries, window, scale, mask, sinks)
    if not isinstance(call, Call):
        return call
    given = call.tokens, window.scheme, call.scores
    try:
        padded = window.aligned(ALIGNED_TOKENS)
        planes = padded.keys, padded.values
        planned = kernels.planned(queries, planes, *given, stores=call.stores)
    except Exception as error:
        return _uncallable(error)
    is_step = queries.shape[2] <= MOST_STEP_TOKENS
    kind = call.stores is not None, is_step
    step = Step(planned, *kind, likeness(queries, window), scale, mask, shape(sinks))
    if is_step:  # a prompt's mask may be large
        _last.keep(step)
    return step


def _uncallable(error: Exception) -> str:
    why = "the kernel could not be called"
    warn(f"{why}, attention is deferred instead: {say(error)}", once=why)
    return why


def encode(scheme: Turbo, keys: mx.array, values: mx.array) -> Planes | None:
    """Both in one launch, the bytes of `codec.reference`; None where the kernel cannot."""
    if not _can_encode(scheme, keys, values, append=False):
        return None
    try:
        return kernels.encode(keys, values, scheme)
    except Exception as error:
        what = "the encoding kernel could not be called"
        warn(f"{what}: {say(error)}", once=what)
        return None


def can_encode_in_place(scheme: Turbo, keys: mx.array, values: mx.array) -> bool:
    """Whether kernels can encode both into the memory of planes, where they `can_append`."""
    return _can_encode(scheme, keys, values, append=True)


def _can_encode(scheme: Turbo, keys: mx.array, values: mx.array, *, append: bool) -> bool:
    if why_no_device():
        return False
    alike = append, scheme, keys.shape, keys.dtype, values.shape, values.dtype
    if alike in _last.encoded:  # by the layer before
        return True
    if not _are_alike(keys, values) or _why_not_encoded(scheme, keys, append):
        return False
    _last.encoded = (alike, *_last.encoded[:1])
    return True


def _are_alike(keys: mx.array, values: mx.array) -> bool:
    return (
        keys.ndim == 4
        and keys.size > 0
        and keys.shape == values.shape
        and keys.dtype == values.dtype
    )


def _why_not_encoded(scheme: Turbo, keys: mx.array, append: bool) -> str:
    about = *scheme.widths, keys.shape[-1], dtype_name(keys.dtype), scheme.search
    return _why_unchecked(_encode_task(*about, append))


def plan_call(
    queries: mx.array,
    window: PackedWindow,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> Call | str:
    """The kernel's call for a step, or why there is none."""
    b, hq, n_queries, d = queries.shape
    h = int(window.keys.scales.shape[1])
    if why := why_no_device():
        return why
    if d != window.head_dim or hq % h or not isinstance(scale, int | float):
        return "queries or a scale of another shape than the kernel's"
    sight = sight_of(mask, n_queries, window.n_tokens)
    if sight is None or (sight.starts is not None and sight.starts.shape != (b,)):
        return "a mask that says more than where rows and windows begin"
    about = *window.scheme.widths, d, dtype_name(queries.dtype)
    kind = sight.starts is not None, sinks is not None
    stores = stored_at(queries, window, sight)
    if stores is not None and _why_unchecked(_attend_task(*about, hq // h, 1, *kind, True)):
        stores = None
    if stores is None and (why := _why_no_kernel(queries, window, about, kind)):
        return why
    scores = _scored(float(scale), sight.window, sinks)
    if sight.starts is None:
        return Call(sight.n_tokens, scores, stores)
    starts, n_tokens = sight.starts.astype(mx.int32), sight.n_tokens
    return Call(kernels.Rows(starts, _lengths(b, n_tokens), n_tokens), scores, stores)


def _why_no_kernel(
    queries: mx.array,
    window: PackedWindow,
    about: tuple[int, int, int, str],
    kind: tuple[bool, bool],
) -> str:
    n_queries = queries.shape[2]
    if n_queries <= MOST_STEP_TOKENS:
        group = queries.shape[1] // window.keys.scales.shape[1]
        return _why_unchecked(_attend_task(*about, group, n_queries, *kind))
    task = _prefill_task(*about, *kind)
    if not has_kernel(task):
        return f"more than {MOST_STEP_TOKENS} query tokens"
    return _why_unchecked(task)


def _scored(scale: float, window: int, sinks: mx.array | None) -> kernels.Scores:
    scores = _scores(scale, window)
    return scores if sinks is None else replace(scores, sinks=sinks)


def dtype_name(dtype: mx.Dtype) -> str:
    """``"float32"``."""
    return NAMES.get(dtype) or str(dtype).removeprefix("mlx.core.")


def _why_unchecked(task: Task) -> str:
    outcome = selfcheck.outcome(task)
    if not outcome.passed:
        warn(outcome.warning, once=outcome.why)
    return outcome.why


@lru_cache(maxsize=8)
def _lengths(b: int, n_tokens: int) -> mx.array:
    return mx.array(np.full(b, n_tokens, np.int32))  # data, not a graph bound to one thread


def _count(what: str) -> None:
    with _lock:
        _counts[what] += 1

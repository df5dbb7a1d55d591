"""What a kernel computes against the definition, on a small input of every kind."""

from itertools import product

import mlx.core as mx
import numpy as np

from kvstow.attention import reference
from kvstow.attention.tasks import AttendTask, EncodeTask, PrefillTask, Task
from kvstow.codec import reference as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.kernels import backend as kernels
from kvstow.kernels.calls import encoded_planes
from kvstow.scheme import Turbo

# Norm of the error over norm of the output. Queries become integers of 14 bits, weights and
# centroids float16; the output is rounded to the dtype of the queries.
TOLERANCE = {"float32": 1e-3, "float16": 1.2e-3, "bfloat16": 4e-3}
N_KV_HEADS, N_TOKENS, CAPACITY = 2, 700, 768  # several splits, the last one cut
STARTS = (0, 37, 600)
WINDOWS = (0, 50)
# Of a prompt: query tokens for the kernel of many rows, whose last block is cut, and for that of
# few; and tokens that are not split.
PROMPT_HEADS, PROMPT_QUERIES, UNSPLIT = 3, (95, 20), 200
N_VECTORS = 64
# Of planes that are appended to: what they hold, and tokens before and behind those appended.
OTHERS, POSITION, ROOM = 77, 3, 10
PLANES = ("key codes", "key scales", "key zeros", "value codes", "value scales")


def difference(task: Task) -> str:
    """How the kernel of `task` differs from the definition; empty if it does not.

    Raises:
        Exception: Whatever compiling and running it does.
    """
    rng = np.random.default_rng(20260130)
    return _of_encoding(task, rng) if isinstance(task, EncodeTask) else _of_attention(task, rng)


def say(error: Exception) -> str:
    """The error's kind and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _of_attention(task: AttendTask | PrefillTask, rng: np.random.Generator) -> str:
    scheme, d = Turbo(task.key_bits, task.value_bits), task.head_dim
    starts = np.array(STARTS if task.ragged else (0, 0), np.int32)
    step = task if isinstance(task, AttendTask) else None
    # In a window that slides, a new token may be stored anywhere.
    place = N_TOKENS - 1 if task.ragged else N_TOKENS // 3
    late = place if step and step.stores else None
    exact = _exact(rng, (len(starts), N_KV_HEADS, CAPACITY, d), task.dtype)
    planes, poisoned = _planes(rng, scheme, exact, starts, late)
    group, steps = (step.group, (step.n_queries,)) if step else (PROMPT_HEADS, PROMPT_QUERIES)
    n_heads, spans = N_KV_HEADS * group, (N_TOKENS,) if step else (N_TOKENS, UNSPLIT)
    sinks = rng.normal(0, 3, n_heads).astype(np.float32) if task.sinks else None
    for n_queries, n_tokens, window in product(steps, spans, WINDOWS):
        shape = (len(starts), n_heads, n_queries, d)
        drawn = mx.array(2 * rng.standard_normal(shape).astype(np.float32))
        queries = drawn.astype(getattr(mx, task.dtype))
        scores = kernels.Scores(d**-0.5, window, None if sinks is None else mx.array(sinks))
        tokens: int | kernels.Rows = n_tokens
        if task.ragged:
            lengths = np.full(len(starts), n_tokens, np.int32)
            tokens = kernels.Rows(mx.array(starts), mx.array(lengths), n_tokens)
        given = queries, poisoned, tokens, scheme, scores
        if late is not None:
            new = exact[0][:, :, late : late + 1], exact[1][:, :, late : late + 1]
            made = _floats(kernels.planned(*given, stores=late)(queries, poisoned, new))
        else:
            made = _floats(kernels.attend(*given))
        with np.errstate(invalid="ignore"):  # a row without tokens
            want = reference.attend(
                _floats(queries),
                *_first(planes, n_tokens),
                scheme=scheme,
                scale=d**-0.5,
                mask=_mask(n_queries, n_tokens, starts, window),
                sinks=sinks,
            )
        want = np.nan_to_num(want)
        error = float(np.linalg.norm(made - want) / np.linalg.norm(want))
        if not error <= TOLERANCE[task.dtype]:  # NaN is a failure too
            said = f" with a window of {window}" if window else ""
            return f"attention{said} is off by {error:.1e}, allowed are {TOLERANCE[task.dtype]:.1e}"
    return "" if late is None else _of_token(late, planes, poisoned)


def _of_token(
    i: int, planes: tuple[PackedKeys, PackedValues], stored: tuple[PackedKeys, PackedValues]
) -> str:
    """How what was stored of a token differs."""
    wanted, got = (*planes[0], *planes[1]), (*stored[0], *stored[1])
    for name, plane, want in zip(PLANES, got, wanted, strict=True):
        there = np.array(_other_handle(plane)).view(want.dtype)[:, :, i]
        if n_wrong := _n_different(there, want[:, :, i]):
            return f"{n_wrong} of {there.size} {name} of the new token differ"
    return ""


def _exact(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str
) -> tuple[mx.array, mx.array]:
    """Keys and values; keys have a mean of their own in each dim."""
    keys = rng.standard_normal(shape) + rng.standard_normal(shape[-1])
    values = rng.standard_normal(shape)
    made = [mx.array(x.astype(np.float32)).astype(getattr(mx, dtype)) for x in (keys, values)]
    return made[0], made[1]


def _planes(
    rng: np.random.Generator,
    scheme: Turbo,
    exact: tuple[mx.array, mx.array],
    starts: np.ndarray,
    late: int | None,
) -> tuple[tuple[PackedKeys, PackedValues], tuple[PackedKeys, PackedValues]]:
    """Planes in numpy; in MLX with noise outside the rows, and for a token that comes late."""
    keys = codec.encode_keys(_floats(exact[0]), bits=scheme.key_bits, guard=True)
    values = codec.encode_values(_floats(exact[1]), bits=scheme.value_bits, guard=True)
    at = np.arange(CAPACITY)
    inside = ((at >= starts[:, None]) & (at < N_TOKENS) & (at != late))[:, None, :, None]

    def poisoned(plane: np.ndarray) -> mx.array:
        noise = rng.integers(-128, 128, plane.shape).astype(plane.dtype)
        if plane.dtype == np.float16:
            noise = np.full_like(plane, np.nan)
        return mx.array(np.where(inside, plane, noise))

    return (keys, values), (PackedKeys(*map(poisoned, keys)), PackedValues(*map(poisoned, values)))


def _first(
    planes: tuple[PackedKeys, PackedValues], n_tokens: int
) -> tuple[PackedKeys, PackedValues]:
    keys, values = planes
    return (
        PackedKeys(*(plane[:, :, :n_tokens] for plane in keys)),
        PackedValues(*(plane[:, :, :n_tokens] for plane in values)),
    )


def _mask(n_queries: int, n_tokens: int, starts: np.ndarray, window: int) -> np.ndarray:
    """Booleans ``(b, 1, l, t)``."""
    at = np.arange(n_tokens)
    own = at[n_tokens - n_queries :, None]
    seen = (at <= own) & (at > own - window if window else True)
    return np.asarray(seen & (at >= starts[:, None, None]))[:, None]


def _of_encoding(task: EncodeTask, rng: np.random.Generator) -> str:
    scheme = Turbo(task.key_bits, task.value_bits, search=task.search)
    dtype = getattr(mx, task.dtype)
    given = _vectors(rng, task.head_dim)
    with np.errstate(over="ignore"):
        keys = mx.array(given).astype(dtype)
        values = mx.array(np.roll(given, 1, axis=2)).astype(dtype)
    made = _appended(keys, values, scheme) if task.append else kernels.encode(keys, values, scheme)
    options = {"guard": True, "search": task.search}
    want = (
        codec.encode_keys(_floats(keys), bits=task.key_bits, **options),
        codec.encode_values(_floats(values), bits=task.value_bits, **options),
    )
    for name, got, plane in zip(PLANES, (*made[0], *made[1]), (*want[0], *want[1]), strict=True):
        if task.append:
            plane = _around(plane)
        if n_wrong := _n_different(np.array(got), plane):
            return f"{n_wrong} of {plane.size} {name} differ"
    return ""


def _around(plane: np.ndarray) -> np.ndarray:
    """A plane amid others' tokens, and room."""
    return np.pad(plane, [(0, 0), (0, 0), (POSITION, ROOM), (0, 0)], constant_values=OTHERS)


def _appended(keys: mx.array, values: mx.array, scheme: Turbo) -> tuple[PackedKeys, PackedValues]:
    """What the kernel leaves in planes that hold others' tokens, in two appends.

    It is read through other handles of their memory, as a batch of rows has them: on a machine
    where these do not share it, tokens would be lost.
    """
    n = keys.shape[2]
    shapes, dtypes = encoded_planes(keys, scheme)
    planes = tuple(
        mx.contiguous(mx.full((*lead, POSITION + n + ROOM, width), OTHERS, dtype))
        for (*lead, _, width), dtype in zip(shapes, dtypes, strict=True)
    )
    handles = tuple(map(_other_handle, planes))
    mx.eval(planes, handles)
    written = None
    for part in (slice(0, 5), slice(5, n)):
        exact = keys[:, :, part], values[:, :, part]
        written = kernels.append(planes, POSITION + part.start, exact, scheme, after=written)
    mx.eval(written)
    made = [handle.view(plane.dtype) for handle, plane in zip(handles, planes, strict=True)]
    return PackedKeys(*made[:3]), PackedValues(*made[3:])


def _other_handle(plane: mx.array) -> mx.array:
    """Of the same memory, as a batch of rows has them of key codes."""
    return plane.view(mx.uint8 if plane.dtype.size == 1 else mx.uint16)


def _vectors(rng: np.random.Generator, d: int) -> np.ndarray:
    """Ordinary vectors, and with outliers, offsets, constants, zeros, tiny and huge elements."""
    x = rng.standard_normal((N_VECTORS, d)) * np.exp(2 * rng.standard_normal((N_VECTORS, 1)))
    x[:8] += 20 * rng.standard_normal((8, 1))
    x[8:12] = rng.standard_normal((4, 1))
    x[12:14] = 0
    x[16:24] *= 10.0 ** rng.uniform(-9, 9, (8, 1))
    x[24:26] *= 1e25
    x[26, 3], x[27, 5] = np.nan, np.inf
    x[:, rng.integers(0, d, 3)] *= 15
    return x.astype(np.float32).reshape(2, 2, N_VECTORS // 4, d)


def _n_different(got: np.ndarray, want: np.ndarray) -> int:
    """Elements that differ; all NaN are equal."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return int(want.size)
    same = got == want
    if want.dtype == np.float16:
        same |= np.isnan(got) & np.isnan(want)
    return int((~same).sum())


def _floats(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))

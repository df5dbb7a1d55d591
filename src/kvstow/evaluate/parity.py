"""The parity suite: what this device computes against the definition, part by part.

Codecs must agree bit for bit, attention within a tolerance. Kernels are checked where there is
a device for them, a sample of every width, head_dim and dtype, and all that were ever used here;
what comes out is remembered as their self-check.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import numpy as np

from kvstow.attention import fused, reference, selfcheck
from kvstow.attention.mlx import attend
from kvstow.attention.parity import say
from kvstow.attention.tasks import AttendTask, EncodeTask, PrefillTask, Task
from kvstow.attention.window import PackedWindow
from kvstow.codec import mlx as fast
from kvstow.codec import reference as codec
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.kernels import backend, prefill
from kvstow.kernels.specialise import DTYPES
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, Turbo

# In float32 the order of sums; on CUDA mlx's attention rounds to TF32, which is 3e-4.
TOLERANCE = 1e-3
PAIRS = ((8, 3), (4, 2), (5, 4), (2, 5), (8, 8))  # every width once
N_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        name: What was compared.
        why: How it differs; empty if it does not.
    """

    name: str
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether it does not differ."""
        return not self.why


def run(on_step: Callable[[str], None]) -> Iterator[Check]:
    """Each check, as it ends."""
    for head_dim in HEAD_DIMS:
        for name, difference in (("codec", _of_codec), ("attention", _of_attention)):
            said = f"{name}, head_dim {head_dim}"
            on_step(said)
            yield Check(said, _caught(difference, head_dim))
    if fused.why_no_device():
        return
    for task in dict.fromkeys([*sample(), *(task for task, _ in selfcheck.remembered())]):
        on_step(f"kernel: {task}")
        outcome = selfcheck.check(task)
        yield Check(f"kernel {outcome.kernel or task}", outcome.why)


def sample() -> list[Task]:
    """Tasks that have every width, head_dim and dtype between them."""
    tasks: list[Task] = []
    for i, (head_dim, pair) in enumerate(product(HEAD_DIMS, PAIRS)):
        dtype, several, searched = DTYPES[i % 3], i % 4 == 1, i % 2 == 0
        n_queries, ragged, sinks = 4 if several else 1, i % 2 == 1, i % 4 >= 2
        step = AttendTask(*pair, head_dim, dtype, 4, n_queries, ragged, sinks)
        tasks.append(step)
        tasks.append(EncodeTask(*pair, head_dim, dtype, searched))
        if backend.can_append():
            tasks.append(EncodeTask(*pair, head_dim, dtype, searched, append=True))
            tasks.append(replace(step, n_queries=1, stores=True))
        if head_dim in prefill.HEAD_DIMS and backend.name() == "cuda":
            tasks.append(PrefillTask(*pair, head_dim, dtype, several, sinks))
    return tasks


def _caught(difference: Callable[[int], str], head_dim: int) -> str:
    try:
        return difference(head_dim)
    except Exception as error:
        return say(error)


def _of_codec(head_dim: int) -> str:
    """How the codec differs in any width."""
    rng = np.random.default_rng(7)
    x = 3 * rng.standard_normal((2, N_TOKENS, head_dim)) + rng.standard_normal(head_dim)
    x = x.astype(np.float32)
    x[0, 0], x[0, 1], x[0, 2, 5] = 0, 1.5, np.nan
    for bits, search in product(KEY_BITS, (False, True)):
        if why := _of_keys(x, bits, search=search):
            return f"keys of {bits} bits{' searched' if search else ''}: {why}"
    for bits, search in product(VALUE_BITS, (False, True)):
        if why := _of_values(x, bits, search=search):
            return f"values of {bits} bits{' searched' if search else ''}: {why}"
    return ""


def _of_keys(x: np.ndarray, bits: int, *, search: bool) -> str:
    keys = codec.encode_keys(x, bits=bits, guard=True, search=search)
    made = fast.encode_keys(mx.array(x), bits=bits, guard=True, search=search)
    back = fast.decode_keys(PackedKeys(*map(mx.array, keys)), bits=bits)
    return _first([*made, back], [*keys, codec.decode_keys(keys, bits=bits)])


def _of_values(x: np.ndarray, bits: int, *, search: bool) -> str:
    d = x.shape[-1]
    values = codec.encode_values(x, bits=bits, guard=True, search=search)
    made = fast.encode_values(mx.array(x), bits=bits, guard=True, search=search)
    back = fast.decode_values(PackedValues(*map(mx.array, values)), bits=bits, head_dim=d)
    return _first([*made, back], [*values, codec.decode_values(values, bits=bits, head_dim=d)])


def _first(made: list[mx.array], want: list[np.ndarray]) -> str:
    for got, wanted in zip(map(np.array, made), want, strict=True):
        same = (got == wanted) | ((got != got) & (wanted != wanted))
        if not same.all():
            return f"{int((~same).sum())} of {same.size} elements differ"
    return ""


def _of_attention(head_dim: int) -> str:
    """How attention over a packed window differs, in any width."""
    rng = np.random.default_rng(8)
    x, y = rng.standard_normal((2, 1, 2, N_TOKENS, head_dim)).astype(np.float32)
    queries = rng.standard_normal((1, 4, 3, head_dim)).astype(np.float32)
    for key_bits, value_bits in PAIRS:
        scheme, scale = Turbo(key_bits, value_bits), head_dim**-0.5
        keys = codec.encode_keys(x, bits=key_bits, guard=True)
        values = codec.encode_values(y, bits=value_bits, guard=True)
        want = reference.attend(queries, keys, values, scheme=scheme, scale=scale, mask="causal")
        stored = PackedKeys(*map(mx.array, keys)), PackedValues(*map(mx.array, values))
        window = PackedWindow(*stored, N_TOKENS, scheme)
        got = np.array(attend(mx.array(queries), window, scale=scale, mask="causal"))
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if not error <= TOLERANCE:
            return f"{scheme} is off by {error:.1e}, allowed are {TOLERANCE:.1e}"
    return ""

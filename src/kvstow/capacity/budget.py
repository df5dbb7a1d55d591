"""Bytes of a context, and the context that fits in some bytes.

What is counted beside the weights, for one sequence of ``T`` tokens:

cache
    Every full layer at the bytes of the scheme, and every other layer that
    grows at those of the model's own dtype, for ``T`` rounded up to
    `STEP_TOKENS`: caches grow in steps.
fixed
    Every sliding layer, at the bytes of a turbo scheme or in the model's own
    dtype: at most its window and one chunk of the prompt, which mlx-lm holds
    while it reads the prompt. And the states of recurrent layers.
working
    What lives only while a step runs, at its largest, when the last chunk of
    the prompt passes one layer (mlx frees a layer's arrays before the next):

    - logits of the next token and their log-probabilities, ``8 * vocab_size``;
    - activations, for each token of a chunk of `PREFILL_TOKENS`: the residual
      stream six times, queries, keys and values twice, and the feed-forward
      layer four times, in the model's own dtype;
    - one layer's cache once more, since growing it copies it;
    - turbo: what encoding one chunk holds on the way, `ENCODE_BYTES` for each
      element, and, on a GPU, what decoding one layer's window does,
      `DECODE_BYTES`; a CPU decodes a block of it at a time, and holds some
      scores and three times the output;
    - the scores ``heads * chunk * T``, which mlx-lm's quantised attention
      (affine) holds whole, and on a CPU mlx's own: under turbo for exact
      tokens only. The fused attention of a GPU holds none.

    The factors are upper bounds of peaks measured on mlx's CPU back-end with
    models that attend in every layer, and ``tests/contracts/test_capacity.py``
    measures them again. What a recurrent layer holds while it reads a chunk
    differs too much between architectures to be counted.

The framework's own allocations, its cache of freed buffers and a batch of more
than one sequence are not counted.
"""

from dataclasses import dataclass
from typing import Literal

from kvstow.capacity.shapes import LayerShape, ModelShape
from kvstow.errors import UnsupportedModel
from kvstow.policy import Policy
from kvstow.scheme import Off, Scheme, Turbo
from kvstow.store import STEP_TOKENS

PREFILL_TOKENS = 2048  # mlx-lm's default prefill_step_size
FLOAT32_BYTES = 4
ENCODE_BYTES = 96  # encoding is not waited for: more than one layer's is under way
DECODE_BYTES = {2: 8, 3: 9, 4: 7, 5: 12, 8: 7}  # by the width of a code
# As in attention.tiled, which needs a framework: elements of a block, scores of a tile, tokens.
BLOCK_ELEMENTS = TILE_SCORES = 1 << 20
LEAST_BLOCK = 256
BLOCK_BYTES, SCORE_BYTES = 32, 24  # for each of these: some blocks are under way at a time
_UNBOUNDED_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one context, beside the weights; the module says what each part is."""

    cache_bytes: int
    fixed_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return self.cache_bytes + self.fixed_bytes + self.working_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """The longest context that fits.

    Args:
        tokens: Its length; None if nothing bounds it.
        bound: What stopped it: ``memory``, the ``model``'s own limit, or ``nothing``.
    """

    tokens: int | None
    bound: Literal["memory", "model", "nothing"]


def check_layer(scheme: Scheme, layer: LayerShape) -> None:
    """Refuse a scheme that cannot store the keys and values of a full layer.

    Raises:
        UnsupportedModel: If their widths differ or do not suit the scheme.
    """
    if isinstance(scheme, Off):
        return
    scheme.check_head_dim(layer.key_dim)
    scheme.check_head_dim(layer.value_dim)
    if layer.key_dim != layer.value_dim:
        raise UnsupportedModel(
            f"{scheme} needs keys and values of one head_dim, "
            f"the model has {layer.key_dim} and {layer.value_dim}"
        )


def bytes_per_token(shape: ModelShape, scheme: Scheme | Policy) -> int:
    """Bytes by which one more token makes the cache larger, over all layers.

    Raises:
        UnsupportedModel: If the scheme cannot store the model's keys and values.
    """
    return _layer_bytes(shape, scheme, *shape.of_kind("full", "plain"))


def cost(shape: ModelShape, scheme: Scheme | Policy, tokens: int, *, on_gpu: bool = True) -> Cost:
    """What `tokens` tokens of context take beside the weights, on a GPU or on a CPU.

    Raises:
        UnsupportedModel: If the scheme cannot store the model's keys and values.
    """
    chunk = min(tokens, PREFILL_TOKENS)
    growing = shape.of_kind("full", "plain")
    attending = shape.of_kind("full", "plain", "sliding", "bounded")
    return Cost(
        cache_bytes=_cache_bytes(shape, scheme, _in_steps(tokens), *growing),
        fixed_bytes=sum(
            layer.state_bytes + _cache_bytes(shape, scheme, _held(layer, tokens, chunk), layer)
            for layer in shape.of_kind("sliding", "bounded", "recurrent")
        ),
        working_bytes=2 * shape.vocab_size * FLOAT32_BYTES
        + chunk * _activation_bytes(shape)
        + max(
            (_cache_bytes(shape, scheme, _in_steps(tokens), layer) for layer in growing), default=0
        )
        + max(
            (_attention_bytes(shape, scheme, layer, tokens, on_gpu) for layer in attending),
            default=0,
        ),
    )


def max_tokens(
    shape: ModelShape, scheme: Scheme | Policy, memory_bytes: int, *, on_gpu: bool = True
) -> Fit:
    """The longest context whose `cost` is at most `memory_bytes`, on a GPU or on a CPU.

    Raises:
        UnsupportedModel: If the scheme cannot store the model's keys and values.
    """
    limit = shape.max_tokens or _UNBOUNDED_TOKENS
    if cost(shape, scheme, limit, on_gpu=on_gpu).total_bytes <= memory_bytes:
        return Fit(limit, "model") if shape.max_tokens else Fit(None, "nothing")
    fits, too_many = 0, limit
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if cost(shape, scheme, middle, on_gpu=on_gpu).total_bytes <= memory_bytes:
            fits = middle
        else:
            too_many = middle
    return Fit(fits, "memory")


def _layer_bytes(shape: ModelShape, policy: Scheme | Policy, *layers: LayerShape) -> int:
    """Bytes of one token in some layers."""
    n_bytes = 0
    for layer in layers:
        scheme = _scheme_of(policy, layer)
        if not _is_stored(scheme, layer):
            one_head = (layer.key_dim + layer.value_dim) * shape.dtype_bytes
        else:
            check_layer(scheme, layer)
            one_head = scheme.bytes_per_token(layer.key_dim, dtype_bytes=shape.dtype_bytes)
        n_bytes += layer.n_kv_heads * one_head
    return n_bytes


def _cache_bytes(shape: ModelShape, policy: Scheme | Policy, room: int, *layers: LayerShape) -> int:
    """Bytes of some layers with room for so many tokens each."""
    n_bytes = 0
    for layer in layers:
        scheme = _scheme_of(policy, layer)
        allocated = _layer_bytes(shape, scheme, layer) * room
        if isinstance(scheme, Turbo) and scheme.start_tokens:
            # Until then the cache is plain, and that may be the larger of the two.
            plain_room = min(room, _in_steps(scheme.start_tokens - 1))
            allocated = max(allocated, _layer_bytes(shape, Off(), layer) * plain_room)
        n_bytes += allocated
    return n_bytes


def _scheme_of(policy: Scheme | Policy, layer: LayerShape) -> Scheme:
    return Policy.of(policy).of_layer(layer.index, layer.kind)


def _is_stored(scheme: Scheme, layer: LayerShape) -> bool:
    """Whether the layer is stored under the scheme; `attach` does as this says."""
    if isinstance(scheme, Off):
        return False
    return layer.kind == "full" or (layer.kind == "sliding" and isinstance(scheme, Turbo))


def _held(layer: LayerShape, tokens: int, chunk: int) -> int:
    """Tokens that a layer has room for while the last chunk of a prompt is read."""
    if not layer.window:
        return _in_steps(tokens)
    return min(_in_steps(tokens), layer.window + _in_steps(chunk))


def _in_steps(tokens: int) -> int:
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def _activation_bytes(shape: ModelShape) -> int:
    """Bytes of one token's activations in one layer."""
    widths = [
        (shape.n_heads + layer.n_kv_heads) * layer.key_dim + layer.n_kv_heads * layer.value_dim
        for layer in shape.layers
        if layer.kind != "recurrent"
    ]
    elements = 6 * shape.hidden_size + 2 * max(widths, default=0) + 4 * shape.ffn_size
    return elements * shape.dtype_bytes


def _attention_bytes(
    shape: ModelShape, policy: Scheme | Policy, layer: LayerShape, tokens: int, on_gpu: bool
) -> int:
    """What a layer holds while it attends, and encodes, for the last chunk of a prompt."""
    scheme, chunk = _scheme_of(policy, layer), min(tokens, PREFILL_TOKENS)
    held = _held(layer, tokens, chunk)
    of_host = shape.n_heads * chunk * shape.dtype_bytes  # for each token attended to
    if not _is_stored(scheme, layer):
        return 0 if on_gpu else of_host * held
    if not isinstance(scheme, Turbo):
        return of_host * tokens
    width = layer.n_kv_heads * layer.key_dim
    encoded = 2 * ENCODE_BYTES * chunk * width
    if on_gpu:
        per_token = DECODE_BYTES[scheme.key_bits] + DECODE_BYTES[scheme.value_bits]
        return encoded + per_token * held * width
    exact = min(held, (scheme.start_tokens or 1) - 1 + chunk)
    return encoded + max(of_host * exact, _tiled_bytes(shape, layer, chunk))


def _tiled_bytes(shape: ModelShape, layer: LayerShape, chunk: int) -> int:
    block = max(BLOCK_ELEMENTS, LEAST_BLOCK * layer.n_kv_heads * layer.key_dim)
    scores = max(TILE_SCORES, LEAST_BLOCK * shape.n_heads)
    output = shape.n_heads * chunk * layer.key_dim * FLOAT32_BYTES
    return BLOCK_BYTES * block + SCORE_BYTES * scores + 3 * output

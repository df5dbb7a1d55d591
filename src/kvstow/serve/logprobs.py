"""A token by itself, as log-probabilities show it: its text and its bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    _byte_decoder,
)

SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token that was drawn, and those that were likely.

    Attributes:
        data: Its bytes, which need not be whole characters.
        logprob: Natural logarithm of its probability.
        top: Bytes and logprob of the likeliest tokens, best first.
    """

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What a token adds to a text, in UTF-8.

    Args:
        tokenizer: mlx-lm's wrapper of one.
        token: Of its vocabulary; another is empty.
    """
    name = tokenizer.convert_ids_to_tokens(token)
    kind = type(tokenizer.detokenizer)
    if name is None:
        return b""
    if issubclass(kind, BPEStreamingDetokenizer):
        table = _byte_decoder()
        if all(letter in table for letter in name):
            return bytes(table[letter] for letter in name)
        return str(name).encode()
    if issubclass(kind, SPMStreamingDetokenizer):
        if name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:-1], 16)])
        return str(name).replace(SPACE, " ").encode()
    return str(tokenizer.decode([token])).encode()


def likelihood(tokenizer: Any, response: Any, n_top: int) -> Likelihood:
    """Of a response of mlx-lm's engine, whose own list of likely tokens has no order."""
    best: Sequence[Any] = sorted(response.top_tokens, key=lambda t: -t["logprob"])[:n_top]
    return Likelihood(
        token_bytes(tokenizer, response.token),
        response.logprob,
        tuple((token_bytes(tokenizer, t["id"]), t["logprob"]) for t in best),
    )

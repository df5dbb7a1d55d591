"""What the names in a directory of prefixes are."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstow.codec.tables import TABLE_SET
from kvstow.policy import Policy
from kvstow.snapshot.header import VERSION
from kvstow.snapshot.manifest import Fingerprint

HEAD_TOKENS = 32  # prefixes that differ in these have nothing to do with each other
SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(
    rf"(?P<head>[0-9a-f]{{16}})-(?P<n_tokens>[0-9]{{1,9}})-(?P<hash>[0-9a-f]{{32}}){SUFFIX}"
)
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Name:
    """The name of one file.

    Attributes:
        head: XXH3 (64 bits) of the first `HEAD_TOKENS` tokens, hexadecimal.
        n_tokens: How many tokens it holds.
        hash: XXH3 (128 bits) of all of them, hexadecimal.
    """

    head: str
    n_tokens: int
    hash: str

    @staticmethod
    def of(tokens: Tokens) -> "Name":
        """Of the file that holds `tokens`."""
        return Name(head_of(tokens), len(tokens), xxhash.xxh3_128_hexdigest(_raw(tokens)))

    @staticmethod
    def parse(name: str) -> "Name | None":
        """The inverse of ``str``; None for other names."""
        match = _NAME.fullmatch(name)
        return match and Name(match["head"], int(match["n_tokens"]), match["hash"])

    def __str__(self) -> str:
        return f"{self.head}-{self.n_tokens}-{self.hash}{SUFFIX}"


def head_of(tokens: Tokens) -> str:
    """See `Name.head`."""
    return xxhash.xxh3_64_hexdigest(_raw(tokens[:HEAD_TOKENS]))


def key_of(model: Fingerprint, tokenizer: str, policy: Policy) -> str:
    """The name of the folder of all prefixes that a model, tokenizer and policy share.

    Args:
        model: Its weights are known; an adapter is a part of them.
        tokenizer: A hash of the vocabulary.
        policy: The schemes, options of the encoder included.
    """
    of_model = [model.architecture, list(model.layers), model.weights]
    said = [VERSION, TABLE_SET, *of_model, tokenizer, str(policy)]
    text = json.dumps(said, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_key(name: str) -> bool:
    """Whether a folder of this name is one of a directory of prefixes."""
    return _KEY.fullmatch(name) is not None


def as_tokens(tokens: Sequence[Any]) -> Tokens | None:
    """Tokens as they are in a file; None if some are no numbers of tokens.

    mlx-lm has negative numbers in the place of images.
    """
    try:
        numbers = np.asarray(tokens, np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    if numbers.ndim != 1 or not numbers.size or numbers.min() < 0 or numbers.max() >= 1 << 32:
        return None
    return numbers.astype(np.uint32)


def _raw(tokens: Tokens) -> bytes:
    return tokens.astype("<u4").tobytes()

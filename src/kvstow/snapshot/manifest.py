"""What a snapshot holds: the model and tokenizer that it belongs to, and its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvstow.codec.tables import TABLE_SET
from kvstow.errors import (
    OtherModel,
    OtherScheme,
    OtherTables,
    OtherTokenizer,
    PolicyError,
    SchemeError,
)
from kvstow.policy import Policy
from kvstow.scheme import Turbo
from kvstow.snapshot.header import damaged
from kvstow.snapshot.record import Record, Tensors

MAX_LAYERS = 1 << 14


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which model computed a cache. There is no scheme in it.

    Attributes:
        architecture: mlx-lm's word for the code that runs it.
        layers: Of each of its caches, the shape in words; see `Record.shape`.
        weights: A hash of them; empty where only the shape is known yet.
    """

    architecture: str
    layers: tuple[str, ...]
    weights: str = ""

    def check(self, other: "Fingerprint") -> None:
        """Refuse another model, as far as both are known.

        Raises:
            OtherModel: If it is one.
        """
        if other.architecture != self.architecture:
            raise OtherModel(
                f"the cache was computed by a {self.architecture}, "
                f"and this model is a {other.architecture}"
            )
        if len(other.layers) != len(self.layers):
            raise OtherModel(
                f"the cache was computed by a {self.architecture} with {len(self.layers)} layers, "
                f"and this model has {len(other.layers)}"
            )
        pairs = enumerate(zip(self.layers, other.layers, strict=True))
        if unlike := [(i, a, b) for i, (a, b) in pairs if a != b]:
            i, a, b = unlike[0]
            raise OtherModel(f"layer {i} of the cache is {a}, and that of this model is {b}")
        if self.weights and other.weights and self.weights != other.weights:
            raise OtherModel(
                "the cache was computed with other weights, another dtype of them or another "
                f"adapter: {self.weights[:12]}, and this model has {other.weights[:12]}"
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is not a tensor.

    Attributes:
        model: Which one computed the cache.
        tokenizer: A hash of the vocabulary.
        policy: The schemes, as they were asked for.
        layers: One record for each cache of the model.
        n_tokens: How many tokens the cache holds.
        created: When, in UTC.
        tables: Name of the tables that packed bytes need.
        notes: Whatever else the writer wants to remember.
    """

    model: Fingerprint
    tokenizer: str
    policy: Policy
    layers: tuple[Record, ...]
    n_tokens: int
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    tables: str = TABLE_SET
    notes: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_dict(said: Mapping[str, Any]) -> "Manifest":
        """The manifest of a JSON object.

        Raises:
            DamagedSnapshot: If it is not the object of one.
        """
        words = ("architecture", "weights", "tokenizer", "policy", "created", "tables")
        if said.keys() != {*words, "shapes", "layers", "n_tokens", "notes"}:
            damaged("the manifest has other keys")
        shapes, layers, notes = said["shapes"], said["layers"], said["notes"]
        if not isinstance(notes, dict) or not isinstance(layers, list):
            damaged("the manifest has no layers")
        if not isinstance(shapes, list) or len(shapes) != len(layers) or len(layers) > MAX_LAYERS:
            damaged("the manifest has another number of shapes than of layers")
        strings = [*(said[word] for word in words), *shapes, *notes.values()]
        if not all(isinstance(x, str) for x in strings) or type(said["n_tokens"]) is not int:
            damaged("the manifest has values of other types")
        try:
            policy = Policy.parse(said["policy"])
        except (PolicyError, SchemeError):
            damaged("the manifest has an unknown policy")
        return Manifest(
            Fingerprint(said["architecture"], tuple(shapes), said["weights"]),
            said["tokenizer"],
            policy,
            tuple(map(Record.from_dict, layers)),
            said["n_tokens"],
            said["created"],
            said["tables"],
            notes,
        )

    def as_dict(self) -> dict[str, Any]:
        """As in the file."""
        return {
            "architecture": self.model.architecture,
            "weights": self.model.weights,
            "shapes": list(self.model.layers),
            "tokenizer": self.tokenizer,
            "policy": str(self.policy),
            "layers": [layer.as_dict() for layer in self.layers],
            "n_tokens": self.n_tokens,
            "created": self.created,
            "tables": self.tables,
            "notes": dict(self.notes),
        }

    @property
    def least_tokens(self) -> int:
        """To how few tokens the cache can be trimmed; `n_tokens` if not at all."""
        return max((layer.least_tokens(self.n_tokens) for layer in self.layers), default=1)

    def check(self, tensors: Tensors) -> None:
        """Refuse tensors that are not those of the layers.

        Raises:
            DamagedSnapshot: If they are not.
            OtherTables: If their bytes mean nothing here.
        """
        if self.tables != TABLE_SET:
            raise OtherTables(
                f"its packed bytes need the tables {self.tables[:80]!r}; "
                f"this program has {TABLE_SET!r}"
            )
        tokens = tensors.get("tokens")
        if tokens is None or (tokens.dtype, tokens.shape) != ("U32", (self.n_tokens,)):
            damaged("there are not as many tokens as it says")
        known = {"tokens"}
        for i, (layer, shape) in enumerate(zip(self.layers, self.model.layers, strict=True)):
            layer.check(tensors, f"{i}.", self.n_tokens)
            for prefix, record in layer.walk(f"{i}."):
                known.update(prefix + name for name in record.tensor_names())
            if "empty" not in (found := layer.shape(tensors, f"{i}.")) and found != shape:
                damaged(f"layer {i} is {found[:80]}, and the model's is {shape[:80]}")
        if unknown := tensors.keys() - known:
            damaged(f"no layer has a tensor {min(unknown)[:80]!r}")

    def check_tokenizer(self, tokenizer: str) -> None:
        """Refuse another tokenizer than the one whose hash is given.

        Raises:
            OtherTokenizer: If it is one.
        """
        if tokenizer != self.tokenizer:
            raise OtherTokenizer(
                f"the tokens of the cache are those of the tokenizer {self.tokenizer[:12]}, "
                f"and this model's is {tokenizer[:12]}"
            )


def check_scheme(index: int, saved: Record, wanted: Record) -> None:
    """Refuse a layer that is stored otherwise than wanted. ``+search`` is the encoder's alone.

    Raises:
        OtherScheme: If it is.
        OtherModel: If it is another kind of layer.
    """
    if saved.kind != wanted.kind or len(saved.members) != len(wanted.members):
        raise OtherModel(f"layer {index} of the cache is {saved.kind}, this model's {wanted.kind}")
    if _without_search(saved) != _without_search(wanted):
        raise OtherScheme(
            f"layer {index} of the cache is stored under {saved.scheme}, "
            f"and {wanted.scheme} is asked for"
        )
    for member, other in zip(saved.members, wanted.members, strict=True):
        check_scheme(index, member, other)


def _without_search(record: Record) -> str:
    scheme = record.scheme
    if isinstance(scheme, Turbo):
        return str(Turbo(scheme.key_bits, scheme.value_bits, scheme.start_tokens, scheme.stored))
    return str(scheme)

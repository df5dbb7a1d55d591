"""One cache of a snapshot: where its tokens lie, what a token is, and which tensors hold it.

The two are apart: a *kind* is one of the ways in which mlx-lm's caches keep tokens, and a
scheme says what a token is, so a packed sliding window is ``sliding`` under turbo.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvstow.errors import SchemeError
from kvstow.scheme import GROUP_SIZE, HEAD_DIMS, Affine, Off, Scheme, Turbo
from kvstow.snapshot.header import TensorInfo, damaged, is_count

# Kind to its numbers. `offset` is the position of the next token.
NUMBERS: dict[str, tuple[str, ...]] = {
    "full": ("offset",),
    "sliding": ("offset", "keep", "max_size", "index"),
    "chunked": ("offset", "chunk_size", "start_position"),
    "arrays": ("size",),
    "list": (),
}
EXACT = ("keys", "values")
AFFINE = tuple(f"{x}_{part}" for x in ("key", "value") for part in ("codes", "scales", "biases"))
PACKED = ("key_codes", "key_scales", "key_zeros", "value_codes", "value_scales")
OF_ROWS = ("left_padding", "lengths")  # of an arrays cache in a batch
MAX_ARRAYS = 1 << 10
FLOATS = ("F32", "F16", "BF16")
Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class Record:
    """What one cache is, without its tensors.

    Attributes:
        kind: One of `NUMBERS`.
        numbers: What the kind needs.
        scheme: Of its tokens.
        stage: ``"empty"``, ``"exact"`` or ``"packed"``; ``"affine"`` under affine.
        dtype: Of the model's keys and values, under turbo, as safetensors spells it.
        members: The caches of a list.
    """

    kind: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    scheme: Scheme = field(default_factory=Off)
    stage: str = "exact"
    dtype: str = ""
    members: tuple["Record", ...] = ()

    @staticmethod
    def from_dict(said: Any, depth: int = 0) -> "Record":
        """The record of a JSON object.

        Raises:
            DamagedSnapshot: If it is not the object of one.
        """
        keys = {"kind", "numbers", "scheme", "stage", "dtype", "members"}
        if not isinstance(said, dict) or said.keys() != keys or depth > 2:
            damaged("a layer is not described")
        numbers, members = said["numbers"], said["members"]
        strings = [said[key] for key in ("kind", "scheme", "stage", "dtype")]
        if not all(isinstance(x, str) for x in strings) or not isinstance(members, list):
            damaged("a layer is described by other things than words")
        if not isinstance(numbers, dict) or not all(map(is_count, numbers.values())):
            damaged("a layer has numbers that are none")
        try:
            scheme = Scheme.parse(said["scheme"])
        except SchemeError:
            damaged("a layer has an unknown scheme")
        within = tuple(Record.from_dict(x, depth + 1) for x in members)
        return Record(said["kind"], numbers, scheme, said["stage"], said["dtype"], within)

    def as_dict(self) -> dict[str, Any]:
        """As in the file."""
        return {
            "kind": self.kind,
            "numbers": dict(self.numbers),
            "scheme": str(self.scheme),
            "stage": self.stage,
            "dtype": self.dtype,
            "members": [member.as_dict() for member in self.members],
        }

    def tensor_names(self) -> tuple[str, ...]:
        """Which tensors there may be; all of them, but in an arrays cache."""
        if self.kind == "arrays":
            return (*map(str, range(self.numbers["size"])), *OF_ROWS)
        names = {"exact": EXACT, "packed": PACKED, "affine": AFFINE}
        return () if self.kind == "list" else names.get(self.stage, ())

    def walk(self, prefix: str) -> Iterator[tuple[str, "Record"]]:
        """This record, and those within, each with the beginning of its tensors' names."""
        yield prefix, self
        for i, member in enumerate(self.members):
            yield from member.walk(f"{prefix}{i}.")

    def schemes(self) -> Iterator[Scheme]:
        """The schemes of all caches that have one."""
        own = () if isinstance(self.scheme, Off) else (self.scheme,)
        yield from chain(own, *(member.schemes() for member in self.members))

    def least_tokens(self, n_tokens: int) -> int:
        """To how few of its `n_tokens` it can be trimmed, and be as if it had read no more."""
        if self.kind == "list":
            return max((member.least_tokens(n_tokens) for member in self.members), default=1)
        forgot = self.kind == "sliding" and self.numbers["offset"] >= self.numbers["max_size"]
        if self.kind == "arrays" or forgot or self.numbers.get("start_position", 0):
            return n_tokens
        if self.stage == "packed" and isinstance(self.scheme, Turbo):
            return max(1, self.scheme.start_tokens or 1)  # fewer would still be exact
        return 1

    def shape(self, tensors: Tensors, prefix: str) -> str:
        """Heads and widths, in words, whatever the scheme is; part of a fingerprint."""
        if self.kind == "list":
            parts = enumerate(self.members)
            return f"list({'; '.join(m.shape(tensors, f'{prefix}{i}.') for i, m in parts)})"
        if self.kind == "arrays":
            found = [tensors.get(f"{prefix}{i}") for i in range(self.numbers["size"])]
            return f"arrays {', '.join('-' if x is None else _times(x.shape) for x in found)}"
        if self.stage == "empty":
            return "empty"
        n_heads, widths = self._widths(tensors, prefix)
        of = {k: n for k, n in self.numbers.items() if k in ("keep", "max_size", "chunk_size")}
        more = "".join(f" {key} {value}" for key, value in of.items())
        return f"{self.kind} {n_heads} x {'/'.join(map(str, widths))}{more}"

    def check(self, tensors: Tensors, prefix: str, n_tokens: int) -> None:
        """Refuse a record that its tensors contradict.

        Args:
            tensors: Those of the whole file.
            prefix: Of the names of this record's own.
            n_tokens: How many tokens the whole file holds.

        Raises:
            DamagedSnapshot: If they do.
        """
        where = f"layer {prefix[:-1]!r}"
        if self.kind not in NUMBERS or self.numbers.keys() != set(NUMBERS[self.kind]):
            damaged(f"{where} is of no known kind")
        if self.members and self.kind != "list":
            damaged(f"{where} has members")
        for i, member in enumerate(self.members):
            member.check(tensors, f"{prefix}{i}.", n_tokens)
        if self.kind == "arrays" and self.numbers["size"] > MAX_ARRAYS:
            damaged(f"{where} has too many arrays")
        if self.kind not in ("arrays", "list"):
            self._check_attention(tensors, prefix, n_tokens, where)

    def _check_attention(self, tensors: Tensors, prefix: str, n_tokens: int, where: str) -> None:
        self._check_stage(where)
        if self.stage != "empty":
            self._check_tensors(tensors, prefix, where)
        if self.numbers["offset"] != (0 if self.stage == "empty" else n_tokens):
            damaged(f"{where} is at another token than the file")

    def _check_stage(self, where: str) -> None:
        stages = {Off: ("exact",), Affine: ("affine",), Turbo: ("exact", "packed")}
        if self.stage not in ("empty", *stages[type(self.scheme)]):
            damaged(f"{where} has the stage {self.stage[:20]!r} under {self.scheme}")
        if isinstance(self.scheme, Affine) and self.kind != "full":
            damaged(f"{where} is {self.kind} under {self.scheme}")
        if isinstance(self.scheme, Turbo) and self.kind == "chunked":
            damaged(f"{where} is {self.kind} under {self.scheme}")
        if (self.dtype in FLOATS) != isinstance(self.scheme, Turbo):
            damaged(f"{where} has the dtype {self.dtype[:20]!r} under {self.scheme}")

    def _check_tensors(self, tensors: Tensors, prefix: str, where: str) -> None:
        found = [tensors.get(prefix + name) for name in self.tensor_names()]
        own = [x for x in found if x is not None]
        if len(own) < len(found) or any(len(x.shape) != 4 for x in own):
            damaged(f"{where} lacks a tensor, or an axis of one")
        if len({x.shape[:3] for x in own}) != 1 or own[0].shape[0] != 1:
            damaged(f"{where} has tensors of different tokens")
        held, n = own[0].shape[2], self.numbers
        if self.kind == "sliding":
            fits = 0 < n["index"] <= held <= n["offset"] and n["keep"] < n["max_size"]
        else:
            fits = held == n["offset"] - n.get("start_position", 0)
        if not fits or not held:
            damaged(f"{where} has {held} tokens, which its numbers deny")
        if tuple(x.dtype for x in own) != self._dtypes(own):
            damaged(f"{where} has tensors of other dtypes than {self.scheme} stores")
        if self.widths_of([x.shape[3] for x in own]) is None:
            damaged(f"{where} has planes of other widths than {self.scheme} stores")

    def _dtypes(self, own: list[TensorInfo]) -> tuple[str, ...]:
        first = own[0].dtype if own[0].dtype in FLOATS else FLOATS[0]
        if self.stage == "packed" and isinstance(self.scheme, Turbo):
            return ("I8" if self.scheme.key_bits == 8 else "U8", "F16", "F16", "U8", "F16")
        if self.stage == "affine":
            scales = own[1].dtype if own[1].dtype in FLOATS else FLOATS[0]
            return ("U32", scales, scales) * 2
        return (first, first)

    def widths_of(self, last: list[int]) -> list[int] | None:
        """Elements of a key and of a value, from the last axes; None if they do not fit."""
        scheme = self.scheme
        if self.stage == "packed" and isinstance(scheme, Turbo):
            dim = last[1] * GROUP_SIZE
            codes = [dim * bits // 8 for bits in (scheme.key_bits, scheme.value_bits)]
            expected = [codes[0], last[1], last[1], codes[1], last[1]]
            return [dim] if last == expected and dim in HEAD_DIMS else None
        if isinstance(scheme, Affine) and self.stage == "affine":
            dims = [last[i] * scheme.group_size for i in (1, 4)]
            parts = [
                (dim * scheme.bits // 32, groups, groups)
                for dim, groups in zip(dims, last[1::3], strict=True)
            ]
            return dims if last == [*parts[0], *parts[1]] else None
        return last

    def _widths(self, tensors: Tensors, prefix: str) -> tuple[int, list[int]]:
        shapes = [tensors[prefix + name].shape for name in self.tensor_names()]
        widths = self.widths_of([shape[-1] for shape in shapes]) or []
        return shapes[0][1], list(dict.fromkeys(widths))


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))

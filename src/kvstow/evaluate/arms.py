"""An arm: one way to store keys and values that is measured, as a string.

A scheme is an arm, and so is a part of one, so that a figure can be traced to
what causes it. An arm has one spelling, ``Arm.parse(str(a)) == a``::

    <scheme>                     as `attach` runs it: fetch auto
    <turbo>@eager | @deferred | @fused   by that path of attention
    <turbo>@keys | @values       only keys, or only values, quantised  (simulated)
    <scheme>@layer<N>            only the N-th cache of the model quantised
    <turbo>@full                 only layers with full attention, no sliding windows
    off@bfloat16 | off@float16   the whole model in that dtype: the noise floor
    policy:<file>                a JSON file of `policy`; spelled as the policy itself
    paper:mse<1..8>[@keys|@values], paper:prod<1..8>[...]
                                 the algorithms of the TurboQuant paper (simulated)

A simulated arm stores what decoding would give back, in the model's own dtype: its
quality is real, and its bytes are computed, not allocated.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from kvstow.errors import EvaluationError
from kvstow.integrations.report import Fetch
from kvstow.policy import Policy, Rule
from kvstow.scheme import GROUP_SIZE, SCALE_BYTES, Off, Scheme, Turbo

PAPER_BITS = range(1, 9)
GRAMMAR = (
    "<scheme>, <turbo>@eager, <turbo>@deferred, <turbo>@fused, <turbo>@keys, <turbo>@values, "
    "<scheme>@layer<N>, <turbo>@full, off@bfloat16, off@float16, policy:<file>, paper:mse<1..8> or "
    "paper:prod<1..8>"
)
Part = Literal["both", "keys", "values"]
_PARTS: dict[str, Part] = {part: part for part in get_args(Part)[1:]}
_FETCHES: dict[str, Fetch] = {fetch: fetch for fetch in get_args(Fetch)[1:]}
_PAPER = re.compile(r"(?P<kind>mse|prod)(?P<bits>[1-8])", re.ASCII)
_LAYER = re.compile(r"layer(?P<index>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Arm:
    """What is quantised, and how attention reaches it.

    Attributes:
        scheme: Of the layers, or a policy; for an arm of the paper, turbo, which says which
            layers.
        fetch: Of a turbo scheme.
        part: Which of keys and values are quantised.
        layer: The only cache that is, if one was named.
        full: Whether layers with a sliding window stay as they are.
        dtype: Of the whole model, for the noise floor.
        paper: ``"mse3"``, an algorithm of the paper in the place of the scheme.
    """

    scheme: Scheme | Policy
    fetch: Fetch = "auto"
    part: Part = "both"
    layer: int | None = None
    dtype: str | None = None
    paper: str | None = None
    full: bool = False

    @staticmethod
    def parse(text: "str | Arm") -> "Arm":
        """Read an arm in the grammar above.

        >>> str(Arm.parse("turbo@values"))
        'turbo:k8v3@values'

        Raises:
            EvaluationError: If `text` is not in the grammar.
            SchemeError: If its scheme is not.
        """
        if isinstance(text, Arm):
            return text
        if text.startswith("policy:"):
            return Arm(Policy.read(Path(text.removeprefix("policy:"))))
        if text.startswith("policy("):
            return Arm(Policy.parse(text))
        name, at, modifier = text.partition("@")
        if name.startswith("paper:"):
            if not _PAPER.fullmatch(paper := name.removeprefix("paper:")):
                raise EvaluationError(f"unknown arm {text!r}; expected {GRAMMAR}")
            arm = Arm(Turbo(), paper=paper)
        else:
            arm = Arm(Scheme.parse(name))
        return arm._modified(modifier) if at else arm

    def __str__(self) -> str:
        name = f"paper:{self.paper}" if self.paper else str(self.scheme)
        modifiers = [self.dtype, None if self.fetch == "auto" else self.fetch]
        modifiers.append(None if self.part == "both" else self.part)
        modifiers.append(None if self.layer is None else f"layer{self.layer}")
        modifiers.append("full" if self.full else None)
        return "@".join([name, *filter(None, modifiers)])

    @property
    def label(self) -> str:
        """The arm in a table or a figure: a policy, which may be long, has its name and a digest.

        >>> Arm.parse("policy(turbo:k8v3; 1: turbo:k4v3)").label
        'policy#75f7'
        """
        if isinstance(self.scheme, Policy):
            return f"policy#{hashlib.sha256(str(self).encode()).hexdigest()[:4]}"
        return str(self)

    @property
    def policy(self) -> Policy:
        """What to attach.

        >>> str(Arm.parse("turbo:k8v4@full").policy)
        'policy(turbo:k8v4; sliding: off)'
        """
        policy = Policy.of(self.scheme)
        if not self.full:
            return policy
        return replace(policy, rules=(*policy.rules, Rule(Off(), kind="sliding")))

    @property
    def is_reference(self) -> bool:
        """Whether this arm is the reference itself, run again."""
        return isinstance(self.scheme, Off) and self.dtype is None

    @property
    def is_simulated(self) -> bool:
        """Whether no packed cache of this arm exists."""
        return self.paper is not None or self.part != "both"

    def bits_per_value(self, head_dim: int, paper_bits: float | None = None) -> float:
        """Stored bits per element of a quantised layer, all metadata included.

        A part that is not quantised counts 16. `paper_bits` are those of the paper's
        quantiser, which knows its own metadata.

        Raises:
            TypeError: If the arm is a policy, under which layers differ.
        """
        if paper_bits is None and isinstance(self.scheme, Turbo):
            metadata = 8 * SCALE_BYTES / GROUP_SIZE
            keys = self.scheme.key_bits + 2 * metadata
            values = self.scheme.value_bits + metadata
        elif paper_bits is None:
            if isinstance(self.scheme, Policy):
                raise TypeError(f"layers differ under {self}")
            return self.scheme.bits_per_value(head_dim)
        else:
            keys = values = paper_bits
        keys, values = (16, values) if self.part == "values" else (keys, values)
        return (keys + (16 if self.part == "keys" else values)) / 2

    def _modified(self, modifier: str) -> "Arm":
        turbo = isinstance(self.scheme, Turbo) and not self.paper
        if modifier in _PARTS and isinstance(self.scheme, Turbo):
            return replace(self, part=_PARTS[modifier])
        if modifier in _FETCHES and turbo:
            return replace(self, fetch=_FETCHES[modifier])
        if modifier == "full" and turbo:
            return replace(self, full=True)
        if (layer := _LAYER.fullmatch(modifier)) and not self.is_reference and not self.paper:
            return replace(self, layer=int(layer["index"]))
        if modifier in ("bfloat16", "float16") and self.is_reference:
            return replace(self, dtype=modifier)
        raise EvaluationError(f"{self} has no variant {modifier!r}; expected {GRAMMAR}")

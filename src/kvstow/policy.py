"""A scheme for each layer, as a value and as a JSON file.

Layers differ in what quantising them costs, so bits are better spent on some than on
others. A policy says which scheme each cache of a model takes; how a scheme stores keys
and values is the same whoever asked for it::

    {
      "default": "turbo:k8v3",
      "rules": [
        {"layers": "0-3, 27", "scheme": "turbo:k8v4"},
        {"kind": "sliding", "scheme": "off"}
      ]
    }

A layer takes the first rule that names it, by its index among the model's caches, by its
kind, or by both, and else the default. Indices are those of `AttachReport.layers`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.errors import PolicyError, SchemeError
from kvstow.scheme import Scheme

LAYER_KINDS = ("full", "sliding")  # of attention; layers without keys and values have no scheme
_ONE_LINE = re.compile(r"policy\((?P<body>.+)\)")
_RANGE = re.compile(r"(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rule:
    """What some layers take.

    Attributes:
        scheme: Of these layers.
        layers: Their indices; None: of every index.
        kind: One of `LAYER_KINDS`; None: of every kind.
    """

    scheme: Scheme
    layers: frozenset[int] | None = None
    kind: str | None = None

    def names(self, index: int, kind: str) -> bool:
        """Whether this rule is about the layer."""
        return (self.layers is None or index in self.layers) and self.kind in (None, kind)

    def as_dict(self) -> dict[str, str]:
        """As in the file."""
        about = {} if self.layers is None else {"layers": spans(self.layers)}
        about |= {} if self.kind is None else {"kind": self.kind}
        return {**about, "scheme": str(self.scheme)}


@dataclass(frozen=True, slots=True)
class Policy:
    """Which scheme each layer takes.

    >>> policy = Policy.from_dict({"rules": [{"layers": "0-1", "scheme": "turbo:k8v8"}]})
    >>> str(policy.of_layer(1, "full")), str(policy.of_layer(2, "full"))
    ('turbo:k8v8', 'turbo:k8v3')

    Attributes:
        default: Of layers that no rule names.
        rules: In the order in which they are asked.
    """

    default: Scheme
    rules: tuple[Rule, ...] = ()

    @staticmethod
    def of(what: "str | Scheme | Policy | None") -> "Policy":
        """A policy as it is, or a scheme for all layers.

        Raises:
            SchemeError: If `what` is a string outside the grammar of schemes.
        """
        return what if isinstance(what, Policy) else Policy(Scheme.parse(what))

    @staticmethod
    def parse(text: str) -> "Policy":
        """The inverse of ``str``.

        >>> str(Policy.parse("policy(turbo:k8v3; full 0-3: turbo:k8v8)"))
        'policy(turbo:k8v3; full 0-3: turbo:k8v8)'

        Raises:
            PolicyError: If `text` says no policy.
            SchemeError: If it is a scheme, and outside the grammar of those.
        """
        if not (match := _ONE_LINE.fullmatch(text)):
            return Policy(Scheme.parse(text))
        default, *rules = match["body"].split("; ")
        content = []
        for rule in rules:
            about, _, scheme = rule.partition(": ")
            first, _, rest = about.partition(" ")
            kind, layers = (first, rest) if first in LAYER_KINDS else (None, about)
            said = {"kind": kind, "layers": layers or None, "scheme": scheme}
            content.append({key: value for key, value in said.items() if value is not None})
        return Policy.from_dict({"default": default, "rules": content})

    @staticmethod
    def read(path: Path) -> "Policy":
        """The policy in a JSON file.

        Raises:
            PolicyError: If the file cannot be read, or says something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_twice)
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"cannot read the policy {path}: {error}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise PolicyError(f"{path} is not JSON: {error}") from error
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from error
        try:
            return Policy.from_dict(content)
        except SchemeError as error:
            raise PolicyError(f"{path}: {error}") from error

    @staticmethod
    def from_dict(content: Any) -> "Policy":
        """The policy of a JSON object.

        Raises:
            PolicyError: If a key is unknown or missing, or a value is not what it has to be.
            SchemeError: If a scheme is outside its grammar.
        """
        _check_keys("a policy", content, {"default", "rules"}, set())
        default = content.get("default", Scheme.default)
        rules = content.get("rules", [])
        if not isinstance(rules, list):
            raise PolicyError(f"rules must be a list, got {rules!r}")
        return Policy(_scheme(default), tuple(map(_rule, rules)))

    def of_layer(self, index: int, kind: str) -> Scheme:
        """What the cache at `index`, of one of `LAYER_KINDS`, takes."""
        return next((r.scheme for r in self.rules if r.names(index, kind)), self.default)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Every scheme that some layer may take, each once, the default first."""
        return tuple(dict.fromkeys([self.default, *(rule.scheme for rule in self.rules)]))

    @property
    def uniform(self) -> Scheme | None:
        """The scheme of all layers, if there is only one."""
        return self.default if len(self.schemes) == 1 else None

    def check(self, kinds: Mapping[int, str]) -> None:
        """Refuse a rule about layers that are not there.

        Args:
            kinds: Index and kind of the layers that have a scheme.

        Raises:
            PolicyError: If a rule names an index that has none, or no layer at all.
        """
        for rule in self.rules:
            if unknown := (rule.layers or frozenset()) - kinds.keys():
                raise PolicyError(
                    f"the rule {rule.as_dict()} names layers {spans(unknown)}; layers with keys "
                    f"and values to store are {spans(kinds) or 'none'}"
                )
            if not any(rule.names(index, kind) for index, kind in kinds.items()):
                raise PolicyError(
                    f"the rule {rule.as_dict()} names no layer of this model; its kinds are "
                    f"{sorted(set(kinds.values()))}"
                )

    def as_dict(self) -> dict[str, Any]:
        """As in the file."""
        return {"default": str(self.default), "rules": [rule.as_dict() for rule in self.rules]}

    def __str__(self) -> str:
        """One line that says all of it; of one scheme, its own spelling.

        >>> str(Policy.from_dict({"rules": [{"kind": "sliding", "scheme": "off"}]}))
        'policy(turbo:k8v3; sliding: off)'
        """
        if not self.rules:
            return str(self.default)
        rules = []
        for rule in self.rules:
            said = rule.as_dict()
            about = " ".join(said[key] for key in ("kind", "layers") if key in said)
            rules.append(f"{about}: {rule.scheme}")
        return f"policy({'; '.join([str(self.default), *rules])})"


def spans(indices: Iterable[int]) -> str:
    """``{0, 1, 2, 5}`` as ``0-2, 5``.

    >>> spans({5, 0, 2, 1})
    '0-2, 5'
    """
    found: list[list[int]] = []
    for i in sorted(indices):
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _rule(content: Any) -> Rule:
    _check_keys("a rule", content, {"layers", "kind", "scheme"}, {"scheme"})
    if not {"layers", "kind"} & content.keys():
        raise PolicyError(f"a rule needs 'layers' or 'kind', got {content}")
    kind = content.get("kind")
    if "kind" in content and kind not in LAYER_KINDS:
        raise PolicyError(f"kind must be one of {LAYER_KINDS}, got {kind!r}")
    layers = _layers(content["layers"]) if "layers" in content else None
    return Rule(_scheme(content["scheme"]), layers, kind)


def _layers(said: Any) -> frozenset[int]:
    """``3``, ``"0-3, 7"`` or a list of both.

    Raises:
        PolicyError: If `said` is something else.
    """
    words = said if isinstance(said, list) else str(said).split(",")
    found: set[int] = set()
    for word in words:
        match = None if isinstance(word, bool) else _RANGE.fullmatch(str(word).strip())
        first, last = (
            (int(match["first"]), int(match["last"] or match["first"])) if match else (1, 0)
        )
        if last < first:
            raise PolicyError(f"layers must be like 3, '0-3, 7' or [0, 1, 7], got {said!r}")
        found.update(range(first, last + 1))
    if not found:
        raise PolicyError(f"layers must be like 3, '0-3, 7' or [0, 1, 7], got {said!r}")
    return frozenset(found)


def _scheme(said: Any) -> Scheme:
    if not isinstance(said, str):
        raise PolicyError(f"a scheme must be a string, got {said!r}")
    return Scheme.parse(said)


def _check_keys(what: str, content: Any, allowed: set[str], needed: set[str]) -> None:
    if not isinstance(content, dict):
        raise PolicyError(f"{what} must be a JSON object, got {content!r}")
    if unknown := content.keys() - allowed:
        raise PolicyError(f"{what} has the keys {sorted(allowed)}, got {sorted(unknown)}")
    if missing := needed - content.keys():
        raise PolicyError(f"{what} needs {sorted(missing)}, got {content}")


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise PolicyError(f"a key is given twice: {[key for key, _ in pairs]}")
    return content

"""Which rows of results belong into one figure, and what keeps them apart.

Figures and reports are made of rows alone. Rows that are drawn together must answer
one question: one window and dtype, the same number of texts of the same sources, and for
each model the very same tokens. Commits and machines may differ: they are named.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import IDENTITY, Row
from kvstow.scheme import Off, Turbo

KINDS = ("kl", "layers", "needle", "law")
LAW_KEY_BITS = 8
LARGEST = 1e100  # a figure beyond it is none
CELL_COUNTS = ("length", "n", "found", "found_off")
# What may differ between two runs of one measurement.
PROVENANCE = (
    *("started", "command", "commit", "machine", "device", "blas", "kvstow", "mlx", "mlx_lm"),
)


def distinct(rows: Iterable[Row]) -> list[Row]:
    """`rows`, whole and each once.

    Raises:
        EvaluationError: If a row lacks a field of its measure, or two rows answer the same
            question differently.
    """
    kept: dict[str, Row] = {}
    for row in rows:
        check(row)
        asked = _text({key: row.get(key) for key in IDENTITY})
        first = kept.setdefault(asked, row)
        # A field that one of them lacks is of a later version: it contradicts nothing.
        fields = sorted((first.keys() & row.keys()) - {*PROVENANCE})
        changed = [key for key in fields if _text(first.get(key)) != _text(row.get(key))]
        if changed:
            raise EvaluationError(
                f"two rows measure {_name(row)}, and their {changed[0]} differs: "
                f"{_text(first.get(changed[0])):.60} ({_run(first)}) and "
                f"{_text(row.get(changed[0])):.60} ({_run(row)}); keep one of them"
            )
    return list(kept.values())


def of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """The rows that a figure of one of `KINDS` shows; there may be none."""
    measure = "needle" if kind == "needle" else "kl"
    shown = _SHOWN[kind]
    return [row for row in rows if row["measure"] == measure and shown(row, Arm.parse(row["arm"]))]


def settings(rows: Iterable[Row]) -> list[list[Row]]:
    """`rows` in groups that can stand in one figure, in the order of their first rows.

    Raises:
        EvaluationError: If rows of one model that agree otherwise are of different tokens.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_text(_setting(row)), []).append(row)
    for group in groups.values():
        for model in dict.fromkeys(row["model"] for row in group):
            _refuse_differences([row for row in group if row["model"] == model], _tokens)
    return list(groups.values())


def check_together(rows: Sequence[Row]) -> None:
    """Refuse rows that cannot stand in one figure.

    Raises:
        EvaluationError: With what differs, and between which rows.
    """
    _refuse_differences(rows, _setting)
    settings(rows)


def runs(rows: Iterable[Row]) -> list[str]:
    """Each commit and machine that measured any of `rows`, once."""
    return list(dict.fromkeys(map(_run, rows)))


def about(row: Row) -> str:
    """The setting that `row` shares with those it is shown with.

    >>> about({"measure": "kl", "dtype": "float32", "window": {"steps": 32}, "texts": {}})
    'float32; steps 32'
    """
    texts = row.get("texts") or {}
    sources = ", ".join(f"{source} {n}" for source, n in texts.get("sources", {}).items())
    window = ", ".join(f"{key.replace('_', ' ')} {_plain(x)}" for key, x in row["window"].items())
    n = f"n = {texts['n_texts']} texts" if "n_texts" in texts else ""
    parts = [row["dtype"], n + (f" ({sources})" if sources else ""), window]
    return "; ".join(filter(None, parts))


def check(row: Row) -> None:
    """Refuse a row that cannot be shown.

    Raises:
        EvaluationError: If it lacks a field of its measure, or one is of another type.
    """
    fields = _EVERY | _FIELDS[row["measure"]]
    for field, expected in fields.items():
        if not expected(row.get(field)):
            raise EvaluationError(
                f"the row of {_name(row)} cannot be shown: its {field!r} is {row.get(field)!r:.60}"
            )


def _refuse_differences(rows: Sequence[Row], read: Callable[[Row], dict[str, Any]]) -> None:
    first = rows[0]
    for row in rows[1:]:
        for field, expected in read(first).items():
            got = read(row)[field]
            if _text(got) != _text(expected):
                raise EvaluationError(
                    f"these rows do not belong into one figure: the {field} of {_name(first)} is "
                    f"{_text(expected)}, that of {_name(row)} is {_text(got)}"
                )


def _setting(row: Row) -> dict[str, Any]:
    """What rows of all models in one figure have in common."""
    texts = row.get("texts") or {}
    return {
        "window": row["window"],
        "dtype": row["dtype"],
        "n_texts": texts.get("n_texts"),
        "sources": texts.get("sources"),
    }


def _tokens(row: Row) -> dict[str, Any]:
    """What rows of one model have in common beside; tokenizers differ between models."""
    return {"texts' sha256": (row.get("texts") or {}).get("sha256")}


def _in_law(row: Row, arm: Arm) -> bool:
    turbo = arm.scheme if isinstance(arm.scheme, Turbo) and not arm.paper else None
    whole = replace(arm, scheme=Off()) == Arm(Off())  # no part, layer or path of it
    return turbo is not None and turbo.key_bits == LAW_KEY_BITS and whole and _differs(row, arm)


def _differs(row: Row, arm: Arm) -> bool:
    return not arm.is_reference and bool(row["mean_kl_nats"] > 0)


_SHOWN: dict[str, Callable[[Row, Arm], bool]] = {
    "kl": lambda row, arm: arm.layer is None and _differs(row, arm),
    "layers": lambda row, arm: arm.layer is not None and _differs(row, arm),
    "law": _in_law,
    "needle": lambda _, arm: not arm.is_reference,
}


def _name(row: Row) -> str:
    return f"{row['measure']} {row.get('arm') or ''} of {row.get('model')}".replace("  ", " ")


def _run(row: Row) -> str:
    return f"commit {row.get('commit') or 'unknown'}, {row.get('machine') or 'unknown machine'}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and abs(value) < LARGEST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_table_of_lists(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(x, list) for x in value.values())


def _are(one: Callable[[Any], bool], n: int | None = None) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and bool(value) and n in (None, len(value)) and all(map(one, value))
    )


def _holds(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(one(value.get(key)) for key, one in fields.items())
    )


def _optional(one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or one(value)


_EVERY = {
    "model": _is_text,
    "dtype": _is_text,
    "window": _is_table,
    "kept": _optional(_is_table_of_lists),
    "texts": _optional(_holds(n_texts=_optional(_is_count), sources=_optional(_is_table))),
}
_QUANTISED = {
    "arm": _is_text,
    "layers": _are(_is_count, 2),
    "bits_per_value": _is_number,
    "interval_95": _are(_is_number, 2),
    "kv_bytes": _optional(_is_count),
}
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "kl": _QUANTISED
    | dict.fromkeys(("mean_kl_nats", "median_kl_nats", "p999_kl_nats"), _is_number)
    | dict.fromkeys(("top1_agreement", "change_of_log_ppl", "reference_ppl"), _is_number)
    | {"per_text_kl_nats": _are(_is_number), "kv_bytes_bf16": _optional(_is_count)},
    "ppl": _QUANTISED | dict.fromkeys(("ppl", "ppl_off", "mean_change_nats"), _is_number),
    "needle": dict.fromkeys(("score", "score_off", "relative"), _is_number)
    | {
        "arm": _is_text,
        "cells": _are(_holds(depth=_is_number, **dict.fromkeys(CELL_COUNTS, _is_count))),
    },
    "profile": {
        "hardness": _is_number,
        "layers_profile": _are(_holds(index=_is_count)),
    },
}

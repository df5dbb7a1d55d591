"""Rows of results as tables of text, one function per measure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstow.evaluate.rows import Row
from kvstow.evaluate.selection import about
from kvstow.evaluate.statistics import found_interval

MISSING = "-"
PROFILE_COLUMNS = {
    "index": "layer",
    "key_norm": "key norm",
    "value_norm": "value norm",
    "ratio": "ratio",
    "outlier_channels": "outlier channels",
    "key_group_range": "key group range",
    "value_group_range": "value group range",
    "key_error": "key error",
}


class Table(NamedTuple):
    """Column heads, and lines of cells; the first column is text, the others are figures."""

    heads: list[str]
    lines: list[list[str]]


def measured(rows: Sequence[Row]) -> Table:
    """Each question once, with the number of rows that answer it."""
    counts: dict[tuple[str, ...], int] = {}
    for row in rows:
        sha256 = (row.get("texts") or {}).get("sha256") or MISSING
        asked = (row["model"], row["measure"], about(row), sha256)
        counts[asked] = counts.get(asked, 0) + 1
    heads = ["model", "measure", "setting", "texts' SHA-256", "rows"]
    return Table(heads, [[*asked, str(n)] for asked, n in counts.items()])


def provenance(rows: Sequence[Row]) -> Table:
    """Each commit, machine and command once."""
    fields = ["commit", "machine", "device", "blas", "kvstow", "mlx", "mlx_lm", "command"]
    lines = [tuple(str(row.get(field) or MISSING) for field in fields) for row in rows]
    heads = [field.replace("_", "-") for field in fields]
    return Table(heads, [list(line) for line in dict.fromkeys(lines)])


def kl(rows: Sequence[Row]) -> Table:
    """Of one model in one setting."""
    heads = ["arm", "layers", "bits per value", "KV bytes", "of bf16", "mean KL, nats"]
    heads += ["95% interval", "median", "p99.9", "top-1 agreement", "log ppl"]
    lines = [
        [
            *_stored(row),
            figure(row["mean_kl_nats"]),
            _interval(row),
            figure(row["median_kl_nats"]),
            figure(row["p999_kl_nats"]),
            f"{row['top1_agreement']:.1%}",
            f"{row['change_of_log_ppl']:+.4f}",
        ]
        for row in rows
    ]
    return Table(heads, lines)


def ppl(rows: Sequence[Row]) -> Table:
    """Of one model in one setting."""
    heads = ["arm", "layers", "bits per value", "KV bytes", "of bf16", "ppl of off", "ppl"]
    heads += ["change, nats per token", "95% interval"]
    lines = [
        [
            *_stored(row),
            f"{row['ppl_off']:.3f}",
            f"{row['ppl']:.3f}",
            f"{row['mean_change_nats']:+.5f}",
            _interval(row),
        ]
        for row in rows
    ]
    return Table(heads, lines)


def needle(rows: Sequence[Row]) -> Table:
    """Of one model in one setting; intervals are of the share found."""
    heads = ["arm", "found", "95% interval", "found by off", "relative"]
    lines = [
        [
            row["arm"],
            f"{row['score']:.1%}",
            "{:.1%} to {:.1%}".format(*found_interval(row["cells"])),
            f"{row['score_off']:.1%}",
            f"{row['relative']:.1%}",
        ]
        for row in rows
    ]
    return Table(heads, lines)


def profile(row: Row) -> Table:
    """The layers of one model; columns that the row lacks are left out."""
    layers = row["layers_profile"]
    columns = [key for key in PROFILE_COLUMNS if any(key in layer for layer in layers)]
    lines = [[figure(layer.get(key)) for key in columns] for layer in layers]
    return Table([PROFILE_COLUMNS[key] for key in columns], lines)


def kept(rows: Sequence[Row]) -> list[str]:
    """Which layers stay as they were, under which arms and why."""
    arms: dict[str, list[str]] = {}
    for row in rows:
        for reason, indices in (row.get("kept") or {}).items():
            listed = ", ".join(map(str, indices))
            arms.setdefault(f"layers {listed} stay as they were: {reason}", []).append(row["arm"])
    return [f"{line} (under {', '.join(dict.fromkeys(named))})" for line, named in arms.items()]


def figure(x: Any) -> str:
    """A number in three digits, without an exponent where that is readable.

    >>> figure(0.000271), figure(12), figure(None), figure(6.5e-7)
    ('0.000271', '12', '-', '6.5e-07')
    """
    if isinstance(x, float):
        return f"{x:.3g}"
    return MISSING if x is None else str(x)


def _stored(row: Row) -> list[str]:
    quantised, total = row["layers"]
    kv_bytes, bf16 = row.get("kv_bytes"), row.get("kv_bytes_bf16")
    return [
        row["arm"],
        f"{quantised} of {total}",
        f"{row['bits_per_value']:.2f}",
        "simulated" if kv_bytes is None else f"{kv_bytes:,}",
        f"{kv_bytes / bf16:.1%}" if kv_bytes and bf16 else MISSING,
    ]


def _interval(row: Row) -> str:
    low, high = row["interval_95"]
    return f"{figure(float(low))} to {figure(float(high))}"

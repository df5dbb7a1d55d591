"""``kvstow fit``: what a context costs on a model, before any weights are loaded."""

import json
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from kvstow.capacity import DTYPE_BYTES, KINDS, ModelShape, bytes_per_token, cost, max_tokens
from kvstow.cli.console import table_console
from kvstow.cli.params import as_json, kv_policy, kv_quants, model, size
from kvstow.errors import PolicyError, UnsupportedModel
from kvstow.integrations import attached
from kvstow.integrations.report import fetch_of
from kvstow.models import read_config, skeleton
from kvstow.models.load import default_dtype
from kvstow.models.locate import locate
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Off, Scheme

SCHEMES = (
    *("off", "affine:8", "affine:4", "turbo:k8v8", "turbo:k8v4", "turbo:k8v3", "turbo:k8v2"),
    *("turbo:k4v3", "turbo:k4v2"),
)


@click.command()
@model
@click.option(
    "--memory",
    "memory_bytes",
    type=size,
    help="Memory for weights and context, such as 24GB (10^9 bytes) or 24GiB (2^30 bytes).",
)
@click.option("--tokens", type=click.IntRange(min=1), help="Length of a context to price.")
@kv_quants(SCHEMES)
@kv_policy
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPE_BYTES)),
    help="Of weights and activations when loaded.  [default: as stored; for GGUF files float32 "
    "on CPU, bfloat16 elsewhere]",
)
@as_json
def fit(
    *,
    model: str,
    memory_bytes: int | None,
    tokens: int | None,
    schemes: tuple[Scheme, ...],
    kv_policy: Policy | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Say what a context costs under each scheme, without weights.

    Prints the bytes per token of the model's cache under each scheme; with
    --memory, the context that fits in it beside the weights; with --tokens,
    the bytes that a context of this length takes. Layers with a sliding window
    stop growing and recurrent ones keep a state: their cost is fixed.

    Working memory is that of the device that mlx computes on here: the
    activations of one layer for 2048 tokens of the prompt, a second copy of
    one layer's cache while it grows, and the logits; for turbo also what
    encoding those tokens holds, and decoding one layer, whole on a GPU and a
    block at a time on a CPU; for affine, and on a CPU without a scheme, also
    the attention scores of those tokens.
    """
    config = read_config(model)
    # First: it says what to install if mlx-lm is missing.
    bare = skeleton(config.config, dtype or default_dtype(locate(model)))
    adapter = require("kvstow.integrations.mlx_lm")
    shape: ModelShape = adapter.read_shape(bare, config.context_length)
    weight_bytes = config.weight_bytes
    if config.n_weights is not None:  # weights that are cast when they are loaded
        weight_bytes = config.n_weights * shape.dtype_bytes
    room_bytes = _room(weight_bytes, memory_bytes)
    on_gpu = bool(require("kvstow.codec.mlx").on_gpu())
    rows = []
    asked: list[Scheme | Policy] = [*schemes, *([kv_policy] if kv_policy else [])]
    for scheme in asked:
        row: dict[str, Any] = {"scheme": str(scheme)}
        try:
            if not isinstance(Policy.of(scheme).uniform, Off):
                # Eager runs wherever another path does, and needs no kernel to be checked.
                with attached(bare, scheme, fetch=fetch_of(scheme, "eager")):
                    pass
            row |= _costs(shape, scheme, room_bytes, tokens, on_gpu)
        except PolicyError as error:
            raise click.UsageError(f"--kv-policy: {error}") from error
        except UnsupportedModel as error:
            row["refused"] = str(error)
        rows.append(row)
    report = {
        "model": model,
        "weight_bytes": weight_bytes,
        "memory_bytes": memory_bytes,
        "dtype_bytes": shape.dtype_bytes,
        "device": "gpu" if on_gpu else "cpu",
        "max_tokens": shape.max_tokens,
        "layers": {kind: len(shape.of_kind(kind)) for kind in KINDS},
        "schemes": rows,
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    console = table_console()
    console.print(_table(report))
    console.print(" ".join(_notes(report, shape)), markup=False)


def _room(weight_bytes: int | None, memory_bytes: int | None) -> int | None:
    if memory_bytes is None:
        return None
    weight_bytes = weight_bytes or 0
    if memory_bytes <= weight_bytes:
        raise click.ClickException(
            f"{size_text(memory_bytes)} of memory does not hold the model's weights, "
            f"which take {size_text(weight_bytes)}"
        )
    return memory_bytes - weight_bytes


def _costs(
    shape: ModelShape,
    scheme: Scheme | Policy,
    room_bytes: int | None,
    tokens: int | None,
    on_gpu: bool,
) -> dict[str, Any]:
    per_token, plain = bytes_per_token(shape, scheme), bytes_per_token(shape, Off())
    row: dict[str, Any] = {
        "bytes_per_token": per_token,
        "compression_ratio": round(plain / per_token, 4) if plain else None,
    }
    if room_bytes is not None:
        row["fits"] = asdict(max_tokens(shape, scheme, room_bytes, on_gpu=on_gpu))
    if tokens is not None:
        needed = cost(shape, scheme, tokens, on_gpu=on_gpu)
        row["at_tokens"] = {"tokens": tokens, **asdict(needed), "total_bytes": needed.total_bytes}
    return row


def _table(report: dict[str, Any]) -> Table:
    rows = report["schemes"]
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("scheme", no_wrap=True)
    for heading in _headings(rows):
        table.add_column(heading, justify="right", no_wrap=True)
    refused = any("refused" in row for row in rows)
    if refused:
        table.add_column("refused, since it")
    for row in rows:
        cells = _cells(row)
        padding = [""] * (len(table.columns) - 1 - refused - len(cells))
        reason = [row.get("refused", "").removeprefix(f"{row['scheme']} ")] if refused else []
        name = "policy" if row["scheme"].startswith("policy(") else row["scheme"]
        table.add_row(name, *cells, *padding, *reason)
    return table


def _headings(rows: list[dict[str, Any]]) -> list[str]:
    headings = ["bytes/token", "smaller"]
    if any("fits" in row for row in rows):
        headings += ["context", "bound by"]
    if any("at_tokens" in row for row in rows):
        headings += ["cache", "fixed", "working", "together"]
    return headings


def _cells(row: dict[str, Any]) -> list[str]:
    if "refused" in row:
        return []
    ratio = row["compression_ratio"]
    cells = [f"{row['bytes_per_token']:,}", f"{ratio:.2f}x" if ratio else "-"]
    if fits := row.get("fits"):
        cells += ["any" if fits["tokens"] is None else f"{fits['tokens']:,}", fits["bound"]]
    if needed := row.get("at_tokens"):
        parts = ("cache_bytes", "fixed_bytes", "working_bytes", "total_bytes")
        cells += [size_text(needed[part]) for part in parts]
    return cells


def _notes(report: dict[str, Any], shape: ModelShape) -> list[str]:
    layers = report["layers"]
    lines = [f"{layers['full']} layers have a cache that grows."]
    if sliding := shape.of_kind("sliding", "bounded"):
        window = f"{sliding[0].window:,} tokens"
        lines.append(f"{len(sliding)} have a window of {window}, a fixed cost.")
    if layers["bounded"]:
        lines.append(f"{layers['bounded']} of these stay as they are under every scheme.")
    if layers["plain"]:
        lines.append(f"{layers['plain']} more grow and stay as they are under every scheme.")
    if layers["recurrent"]:
        state_bytes = sum(layer.state_bytes for layer in shape.of_kind("recurrent"))
        lines.append(f"{layers['recurrent']} have a state of fixed size: {size_text(state_bytes)}.")
    if any({"fits", "at_tokens"} & set(row) for row in report["schemes"]):
        lines.append(f"Working memory is that of a {report['device'].upper()}, as mlx has here.")
    lines.append(f"Without a scheme an element takes {8 * shape.dtype_bytes} bits (see --dtype).")
    if report["weight_bytes"] is None:
        lines.append("The size of the weights is not known here: it is not counted.")
    else:
        lines.append(f"The weights take {size_text(report['weight_bytes'])} once loaded.")
    return lines


def size_text(n_bytes: int) -> str:
    """Write bytes in powers of ten.

    >>> size_text(24 * 10**9), size_text(145_000_000), size_text(512)
    ('24.00 GB', '145.0 MB', '0.5 kB')
    """
    if n_bytes >= 10**9:
        return f"{n_bytes / 10**9:.2f} GB"
    if n_bytes >= 10**6:
        return f"{n_bytes / 10**6:.1f} MB"
    return f"{n_bytes / 10**3:.1f} kB"

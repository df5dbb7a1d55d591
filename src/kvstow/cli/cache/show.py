"""``kvstow cache show``: what a saved cache holds, and whether it is whole."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from kvstow.cli import params
from kvstow.policy import spans
from kvstow.snapshot import Snapshot


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@params.as_json
def show(*, file: Path, as_json: bool) -> None:
    """Say what FILE holds, and check every byte of it. Needs no model.

    Exits with 1 if FILE is damaged, or nothing that this version of kvstow reads.
    """
    with Snapshot(file) as snapshot:
        snapshot.verify()
        said = describe(snapshot)
    click.echo(json.dumps(said) if as_json else "\n".join(_lines(said)))


def describe(snapshot: Snapshot) -> dict[str, Any]:
    """What is in a file, as JSON can say it."""
    manifest = snapshot.manifest
    kv_bytes = sum(x.n_bytes for name, x in snapshot.tensors.items() if name != "tokens")
    groups = _groups(
        (shape, "; ".join(map(str, dict.fromkeys(layer.schemes()))) or "off")
        for shape, layer in zip(manifest.model.layers, manifest.layers, strict=True)
    )
    return {
        "file": str(snapshot.path),
        "bytes": snapshot.n_bytes,
        "kv_bytes": kv_bytes,
        "tokens": manifest.n_tokens,
        "scheme": str(manifest.policy),
        "layers": [{"layers": at, "shape": a, "scheme": b} for (a, b), at in groups.items()],
        "architecture": manifest.model.architecture,
        "weights": manifest.model.weights,
        "tokenizer": manifest.tokenizer,
        "tables": manifest.tables,
        "created": manifest.created,
        "notes": dict(manifest.notes),
        "tensors_checked": len(snapshot.tensors),
    }


def _groups(layers: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Shape and scheme to the indices of the layers that have both."""
    found: dict[tuple[str, str], list[int]] = {}
    for i, layer in enumerate(layers):
        found.setdefault(layer, []).append(i)
    return {layer: spans(indices) for layer, indices in found.items()}


def _lines(said: dict[str, Any]) -> list[str]:
    notes = [f"{key:<11} {value}" for key, value in said["notes"].items()]
    return [
        f"file        {said['file']}, {said['bytes']:,} bytes",
        f"tokens      {said['tokens']}",
        f"scheme      {said['scheme']}",
        *(f"layers      {x['layers']}: {x['shape']}, {x['scheme']}" for x in said["layers"]),
        f"KV cache    {said['kv_bytes']:,} bytes",
        f"computed by {said['architecture']}, weights {said['weights']}",
        f"tokenizer   {said['tokenizer']}",
        f"created     {said['created']}",
        *(["notes"] if notes else []),
        *(f"  {note}" for note in notes),
        f"checked     {said['tensors_checked']} tensors, all as they were written",
    ]

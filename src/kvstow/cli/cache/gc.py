"""``kvstow cache gc``: check a prefix cache, and remove what nobody will use."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kvstow.cli import params
from kvstow.cli.cache import saved
from kvstow.cli.progress import progress_bar
from kvstow.errors import SnapshotError
from kvstow.snapshot.prefixes import PrefixDirectory, files, unusable_for_all


@click.command()
@saved.where
@click.option(
    "--max-bytes",
    type=params.size,
    metavar="SIZE",
    help="Remove what was not used for the longest time, until the others take this, as 10GB.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@params.as_json
def gc(*, prefix_cache: Path, max_bytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Read every byte of a prefix cache, and remove what is damaged.

    Files that writers left unfinished are removed once they are a day old. Without --max-bytes
    nothing that is whole is removed. Others may use the directory meanwhile.
    """
    unfinished = [file for file in files.temporary(prefix_cache) if file.is_abandoned]
    gone = {file.path: "unfinished" for file in unfinished}
    held = files.entries(prefix_cache)
    left: dict[Path, str] = {}
    with progress_bar("checking", shown=bool(held)) as step:
        for path, error in _problems(prefix_cache, held, step):
            (gone if unusable_for_all(error) else left)[path] = str(error).removeprefix(f"{path}: ")
    if max_bytes is not None:
        sound = [x for x in held if x.path not in gone]
        gone |= {x.path: "not used" for x in files.surplus(sound, max_bytes)}
    sizes = {file.path: file.n_bytes for file in (*unfinished, *held)}
    if not dry_run:
        left |= {path: "cannot be removed" for path in gone if not files.remove(path)}
    removed = {path: why for path, why in gone.items() if path not in left}
    said = {
        "checked": len(held),
        "removed": [{"file": str(path), "why": why} for path, why in removed.items()],
        "bytes": sum(sizes[path] for path in removed),
        "left": [{"file": str(path), "why": why} for path, why in left.items()],
        "dry_run": dry_run,
    }
    click.echo(json.dumps(said) if as_json else "\n".join(_lines(said)))


def _problems(
    root: Path, held: list[files.Stored], step: Any
) -> Iterator[tuple[Path, SnapshotError]]:
    directory = PrefixDirectory(root)
    for i, file in enumerate(held):
        step(i, len(held))
        try:
            directory.check(file.path)
        except SnapshotError as error:
            if not files.is_gone(file.path):  # by another process
                yield file.path, error


def _lines(said: dict[str, Any]) -> Iterator[str]:
    would = "would be " if said["dry_run"] else ""
    for x in said["removed"]:
        yield f"{would}removed {x['file']}: {x['why']}"
    for x in said["left"]:
        yield f"left {x['file']}: {x['why']}"
    n_removed = f"{len(said['removed'])} {would}removed, {said['bytes']:,} bytes"
    yield f"checked {said['checked']}; {n_removed}"

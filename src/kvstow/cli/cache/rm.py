"""``kvstow cache rm``: remove prefixes from disk, and files that were saved by hand."""

import json
from pathlib import Path

import click

from kvstow.cli import params
from kvstow.cli.cache import saved
from kvstow.errors import ForeignSnapshot, PolicyError, SchemeError, SnapshotError
from kvstow.policy import Policy
from kvstow.snapshot import Snapshot
from kvstow.snapshot.prefixes import files


@click.command()
@click.argument("names", metavar="[NAME|FILE]...", nargs=-1)
@click.option("--model", help="All prefixes of this model, called as `kvstow cache ls` does.")
@click.option("--scheme", help="All prefixes under this scheme or policy, as `ls` spells it.")
@click.option("--all", "everything", is_flag=True, help="All prefixes.")
@saved.where
@params.as_json
def rm(
    *,
    names: tuple[str, ...],
    model: str | None,
    scheme: str | None,
    everything: bool,
    prefix_cache: Path,
    as_json: bool,
) -> None:
    """Remove prefixes from disk by their NAMEs, or saved FILEs.

    With --model and --scheme, prefixes that are both. A FILE that is no saved cache is refused.
    """
    ways = [bool(names), model is not None or scheme is not None, everything]
    if sum(ways) != 1:
        raise click.UsageError("give one of: names, --model with or without --scheme, --all")
    if names:
        chosen = _named(names, prefix_cache)
    else:
        chosen = [
            x
            for x in saved.of_prefixes(prefix_cache)
            if (model is None or x.model == model)
            and (scheme is None or x.scheme == _spelt(scheme))
        ]
    removed = [x for x in chosen if files.remove(Path(x.file))]
    n_bytes = sum(x.bytes for x in removed)
    if as_json:
        click.echo(json.dumps({"removed": [x.as_dict() for x in removed], "bytes": n_bytes}))
    else:
        click.echo(f"removed {len(removed)}, {n_bytes:,} bytes")
    if len(removed) < len(chosen):
        left = next(x.file for x in chosen if x not in removed)
        raise click.ClickException(f"{len(chosen) - len(removed)} cannot be removed, as {left}")


def _spelt(scheme: str) -> str:
    try:
        return str(Policy.parse(scheme))
    except (SchemeError, PolicyError) as error:
        raise click.UsageError(f"--scheme: {error}") from error


def _named(names: tuple[str, ...], root: Path) -> list[saved.Saved]:
    known = saved.of_prefixes(root)
    chosen = []
    for name in dict.fromkeys(names):
        found = [x for x in known if x.name == name]
        if len(found) > 1:
            raise click.UsageError(f"{name} is the name of {len(found)} prefixes: give their files")
        if not found:
            path = Path(name)
            if not path.is_file():
                raise click.UsageError(f"{name} is neither a prefix in {root} nor a file")
            _check_ours(path)
            found = list(saved.of_files((path,)))
        chosen += found
    return chosen


def _check_ours(path: Path) -> None:
    try:
        Snapshot(path).close()
    except ForeignSnapshot as error:
        raise click.UsageError(f"{path} is no saved cache, so it is not removed") from error
    except SnapshotError:
        return  # one that is damaged or too new may go

"""``kvstow eval plot``: rows of results as a figure."""

from pathlib import Path

import click

from kvstow.cli.eval import params, results
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import Row
from kvstow.evaluate.selection import KINDS
from kvstow.require import require


@click.command()
@results.files
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="kl",
    show_default=True,
    help="kl: mean KL against bits per value; layers: KL of arms such as turbo:k8v3@layer5, by "
    "layer; needle: facts found, by depth and length; law: KL against the bits of values, with "
    "the rate at which it falls.",
)
@click.option(
    "--arm",
    "arms",
    type=params.arm,
    multiple=True,
    help="Draw only this arm; may be repeated.  [default: all]",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=results.with_suffix(".svg", ".png", ".pdf"),
    required=True,
    help="The figure: an .svg, .png or .pdf file.",
)
def plot(*, files: tuple[Path, ...], kind: str, arms: tuple[Arm, ...], output: Path) -> None:
    """Draw rows of results as a figure, without a model.

    Rows of other kinds are left out. Those that are drawn must be of one window and dtype, the
    same number of texts of the same sources, and for each model the same tokens. Needs the extra
    kvstow[eval].
    """
    rows = only(results.read(files), arms)
    require("kvstow.evaluate.plot", extra="eval").plot(rows, kind, output)


def only(rows: list[Row], arms: tuple[Arm, ...]) -> list[Row]:
    """The rows of `arms`, or all if there are none.

    Raises:
        click.UsageError: If one has no row.
    """
    if not arms:
        return rows
    names = [str(arm) for arm in arms]
    there = {row.get("arm") for row in rows}
    if missing := [name for name in names if name not in there]:
        raise click.UsageError(f"--arm {missing[0]} has no row in these files")
    return [row for row in rows if row.get("arm") in names]

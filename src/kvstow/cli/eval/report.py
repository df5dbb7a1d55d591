"""``kvstow eval report``: rows of results as one page."""

from pathlib import Path

import click

from kvstow.cli.eval import results
from kvstow.require import require


@click.command()
@results.files
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=results.with_suffix(".html"),
    required=True,
    help="The page: an .html file.",
)
def report(*, files: tuple[Path, ...], output: Path) -> None:
    """Write rows of results as one HTML page, without a model.

    The page holds its figures and styles itself, and no script. Rows of different windows,
    dtypes and texts get tables and figures of their own. Needs the extra kvstow[eval].
    """
    rows = results.read(files)
    require("kvstow.evaluate.report", extra="eval").write_report(rows, output)

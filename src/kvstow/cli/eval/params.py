"""Option types of the verbs that measure."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvstow.errors import EvaluationError, SchemeError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.texts import SOURCES


def arm(value: str) -> Arm:
    """Read ``turbo:k8v3@eager``; what is no arm is a usage error on the flag."""
    try:
        return Arm.parse(value)
    except (SchemeError, EvaluationError) as error:
        raise click.BadParameter(str(error)) from error


def arms(default: Sequence[str]) -> Callable[[Any], Any]:
    """Make an ``--arm`` that may be repeated."""
    return click.option(
        "--arm",
        "arms",
        type=arm,
        multiple=True,
        default=default,
        help=f"What to measure; may be repeated.  [default: {', '.join(default)}]",
    )


texts = click.option(
    "--texts",
    "n_texts",
    type=click.IntRange(min=1),
    help="How many texts.  [default: every --text, or 16 of the sources, taken in turn]",
)
text_files = click.option(
    "--text",
    "files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A UTF-8 file to score in the place of the bundled texts; may be repeated.",
)
sources = click.option(
    "--source",
    "sources",
    type=click.Choice(SOURCES),
    multiple=True,
    default=SOURCES,
    help=f"Of the bundled texts; may be repeated.  [default: {', '.join(SOURCES)}]",
)
name = click.option("--name", help="What rows call the model.  [default: the last part of --model]")
dtype = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and activations. Below float32, its own noise hides small differences.",
)


def writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that rows cannot go to before there are any; leaves none behind."""
    if path is None:
        return None
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise click.BadParameter(f"cannot write {str(path)!r}: {error.strerror}.") from error
    return path


def output_to(*, required: bool) -> Callable[[Any], Any]:
    """Make an ``--output``."""
    return click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=writable,
        required=required,
        help="Append one JSON row per result to this file; rows that it holds are not measured "
        "again.",
    )


output = output_to(required=False)

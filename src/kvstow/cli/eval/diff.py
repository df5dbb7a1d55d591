"""``kvstow eval diff``: what one prompt gives under two arms, side by side."""

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from kvstow.cli import params as common
from kvstow.cli.console import table_console
from kvstow.cli.eval import params
from kvstow.cli.eval.run import bench
from kvstow.cli.generate import read_prompt
from kvstow.cli.progress import progress_bar
from kvstow.evaluate.arms import Arm
from kvstow.integrations import attached
from kvstow.models import read_config
from kvstow.require import require

DEFAULT_ARMS = ("off", "turbo:k8v3")


def two_arms(_: Any, __: Any, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    """Check that there are two to compare."""
    if len(arms) != 2:
        raise click.BadParameter(f"expected two arms, got {len(arms)}")
    return arms


@click.command()
@common.model
@common.prompt
@common.prompt_file
@common.chat_template
@click.option(
    "--arm",
    "arms",
    type=params.arm,
    multiple=True,
    default=DEFAULT_ARMS,
    callback=two_arms,
    help=f"What to compare; give two.  [default: {', '.join(DEFAULT_ARMS)}]",
)
@click.option(
    "--max-tokens",
    "-m",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Most tokens to generate under each.",
)
@params.dtype
@common.as_json
def diff(
    *,
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    chat_template: bool,
    arms: tuple[Arm, Arm],
    max_tokens: int,
    dtype: str,
    as_json: bool,
) -> None:
    """Show where the answers of two arms part.

    Both take the most likely token each time. Where the texts part, the probabilities of the two
    tokens tell whether it was a near tie, which any rounding turns, or a change of mind.
    """
    text = read_prompt(prompt, prompt_file)
    limit = read_config(model).context_length
    with bench(model, arms, dtype=dtype, output=None, name=None) as on:
        with attached(on.model, "off") as report:
            session = require("kvstow.session").Session(
                on.model, on.tokenizer, report, context_tokens=limit
            )
            tokens = session.encode(text, chat_template=chat_template)
        if limit is not None:
            max_tokens = min(max_tokens, limit - len(tokens))
        with progress_bar("generating") as step:
            found = require("kvstow.evaluate.diff").diff(
                on.model,
                tokens,
                arms,
                max_tokens=max_tokens,
                ends=frozenset(on.tokenizer.eos_token_ids),
                on_step=step,
            )
        decode = on.tokenizer.decode
    texts = [decode(continuation) for continuation in found.tokens]
    if as_json:
        parted = found.parting and [decode([token]) for token in found.parting.tokens]
        about = {"model": on.about["model"], "dtype": dtype, "prompt_tokens": len(tokens)}
        about |= {"texts": texts, "parting_texts": parted}
        click.echo(json.dumps(about | found.as_dict()))
        return
    console = table_console()
    console.print(table(found, decode))
    console.print(verdict(found, decode), markup=False, soft_wrap=True)


def table(found: Any, decode: Any) -> Table:
    """The two texts, bold from where they part."""
    shown = Table(expand=True)
    parts_at = found.parting.index if found.parting else len(found.tokens[0])
    cells = []
    for arm, tokens in zip(found.arms, found.tokens, strict=True):
        shown.add_column(arm, ratio=1, overflow="fold")
        same = decode(tokens[:parts_at])
        cells.append(Text(same).append(decode(tokens)[len(same) :], style="bold"))
    shown.add_row(*cells)
    return shown


def verdict(found: Any, decode: Any) -> str:
    """Where they part, and how near a tie it was; several lines."""
    n = len(found.tokens[0])
    if found.parting is None:
        return f"The texts are equal: all {n} tokens."
    parting = found.parting
    names = [repr(decode([token])) for token in parting.tokens]
    lines = [f"The texts part at token {parting.index + 1}: {names[0]} or {names[1]}."]
    for arm, p, gap in zip(found.arms, parting.probabilities, parting.gaps, strict=True):
        lines.append(f"  {arm}: {p[0]:.4f} or {p[1]:.4f}, its own is ahead by {gap:.4f}")
    return "\n".join(lines)

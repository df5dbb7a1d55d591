"""``kvstow eval profile``: whether a model's keys survive 4 bits, and which layers do not."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from kvstow.cli import params as common
from kvstow.cli.console import table_console
from kvstow.cli.eval import kl, params
from kvstow.cli.eval.propose import Wanted, propose
from kvstow.cli.eval.run import Bench, bench, chosen_texts, row_shower
from kvstow.cli.progress import Step
from kvstow.cli.refuse import check_context
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import Row
from kvstow.evaluate.texts import Text, passages
from kvstow.models import read_config
from kvstow.require import require
from kvstow.scheme import Off, Scheme, Turbo

SHOWN_LAYERS = 12


def one_scheme(value: str) -> Arm:
    """Read a scheme that quantises: its arms of one layer are what is measured."""
    arm = params.arm(value)
    if arm != Arm(arm.scheme) or isinstance(arm.scheme, Off):
        raise click.BadParameter(f"expected a scheme that quantises, got {value!r}")
    return arm


def one_turbo(value: str) -> Turbo:
    """Read a turbo scheme."""
    scheme = common.scheme(value)
    if not isinstance(scheme, Turbo):
        raise click.BadParameter(f"expected a turbo scheme, got {value!r}")
    return scheme


@click.command()
@common.model
@params.texts
@click.option(
    "--tokens",
    "n_tokens",
    type=click.IntRange(min=16),
    default=160,
    show_default=True,
    help="Of each text.",
)
@click.option(
    "--layers-kl",
    "layers_kl",
    type=one_scheme,
    metavar="SCHEME",
    help="Also measure, layer by layer, the KL when only that layer is under SCHEME: the last 32 "
    "of the tokens are scored. turbo:k4v8 shows the layers that need more bits for keys.",
)
@click.option(
    "--write-policy",
    "policy_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also propose a scheme for every layer: what widths cost is measured on half of the "
    "texts, bytes go where KL falls most for them, and the policy is checked on the other half. "
    "The file is for --kv-policy.",
)
@click.option(
    "--budget",
    type=one_turbo,
    default=Scheme.default,
    show_default=True,
    metavar="SCHEME",
    help="The policy takes at most the bytes of this scheme, and has its options.",
)
@params.text_files
@params.sources
@params.dtype
@params.name
@params.output
@common.as_json
def profile(
    *,
    model: str,
    n_texts: int | None,
    n_tokens: int,
    layers_kl: Arm | None,
    policy_file: Path | None,
    budget: Turbo,
    files: tuple[Path, ...],
    sources: tuple[str, ...],
    dtype: str,
    name: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Say how hard a model's keys are, layer by layer.

    A layer's hardness is the error of its keys at 4 bits over the distances between them.
    Beyond the threshold of 0.5, schemes with fewer than 8 bits for keys are not for this model.
    """
    window = require("kvstow.evaluate.profile").Window(n_tokens)
    scored = _scored(n_tokens) if layers_kl or policy_file else None
    wanted = _wanted(policy_file, budget)
    check_fit(read_config(model).context_length, window)
    texts = chosen_texts(files, sources, n_texts)
    arms = [layers_kl] if layers_kl else []
    if wanted:
        wanted.check(texts)
        arms.append(Arm(budget))
    with bench(model, arms, dtype=dtype, output=output, name=name) as on:
        rows = on.measure(questions(on, (), texts, window), show=row_shower(as_json))
        if not as_json:
            show(rows)
        if layers_kl:
            of_layers = tuple(
                replace(layers_kl, layer=layer["index"]) for layer in rows[0]["layers_profile"]
            )
            asked = kl.questions(on, of_layers, texts, scored)
            rows = on.measure(asked, show=row_shower(as_json))
            if not as_json:
                kl.show(rows)
        if wanted:
            propose(on, texts, scored, wanted, as_json=as_json)


def _wanted(policy_file: Path | None, budget: Turbo) -> Wanted | None:
    """What is to be proposed, if anything.

    Raises:
        click.UsageError: If there is a budget for nothing.
    """
    if policy_file is not None:
        return Wanted(policy_file, budget)
    given = click.get_current_context().get_parameter_source("budget")
    if given is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError(f"--budget needs --write-policy, got --budget {budget} alone")
    return None


def check_fit(limit: int | None, window: Any) -> None:
    """Refuse a window beyond the model's context, as `check_context` does."""
    check_context(limit, "--tokens", window.n_tokens)


def questions(on: Bench, _: tuple[Arm, ...], texts: Sequence[Text], window: Any) -> list[Any]:
    """The one there is, for `Bench.measure`: no arm changes what a model is."""
    measure = require("kvstow.evaluate.profile")
    read = passages(on.tokenizer, texts, window.n_tokens)
    about = {"measure": "profile", "window": window.as_dict(), "texts": read.about()}

    def answer(_: Step) -> Row:
        described: Row = measure.profile(on.model, read).as_dict()
        return described

    return [(about, answer)]


def show(rows: list[Row]) -> None:
    """Print the table, and what to do about it."""
    for row in rows:
        table_console().print(table(row))
        click.echo(verdict(row))


def table(row: Row) -> Table:
    """The hardest layers, for people."""
    layers = sorted(row["layers_profile"], key=lambda layer: -layer["hardness"])
    n, total = row["layers"]
    shown = Table(
        title=f"Keys and values of {row['model']} in {row['dtype']}; {n} of {total} caches are "
        f"attention, the {min(n, SHOWN_LAYERS)} hardest first; n = "
        f"{row['texts']['n_texts']} texts of {row['window']['n_tokens']} tokens"
    )
    for column in ("cache", "hardness", "error at 4 bits", "at 8 bits", "|K|", "|V|", "|K|/|V|"):
        shown.add_column(column, justify="right", no_wrap=True)
    for column in ("outliers", "K range", "V range"):
        shown.add_column(column, justify="right", no_wrap=True)
    for layer in layers[:SHOWN_LAYERS]:
        shown.add_row(
            str(layer["index"]),
            f"{layer['hardness']:.2f}" + ("!" if layer["hardness"] > row["threshold"] else " "),
            f"{layer['key_error_4bit']:.3f}",
            f"{layer['key_error_8bit']:.4f}",
            *(f"{layer[name]:.4g}" for name in ("key_norm", "value_norm", "ratio")),
            f"{layer['outlier_channels']} of {layer['channels']}",
            *(f"{layer[name]:.2f}" for name in ("key_group_range", "value_group_range")),
        )
    return shown


def verdict(row: Row) -> str:
    """What to do about it, one line."""
    figures = f"hardness {row['hardness']:.2f}, the threshold is {row['threshold']}"
    if not row["hard_keys"]:
        return f"The keys are not hard ({figures}): 4 bits for keys cost what they do elsewhere."
    hard = [x["index"] for x in row["layers_profile"] if x["hardness"] > row["threshold"]]
    return (
        f"The keys are hard ({figures}; caches {', '.join(map(str, hard))}): use 8 bits for keys, "
        "for example turbo:k8v3. Rounding to 4 bits loses what tells one key from another."
    )


def _scored(n_tokens: int) -> Any:
    """The last steps of the same texts."""
    measure = require("kvstow.evaluate.kl")
    prefix = n_tokens - measure.STEPS - 1
    if prefix < 1:
        raise click.UsageError(
            f"--layers-kl and --write-policy score {measure.STEPS} tokens and need --tokens "
            f"{measure.STEPS + 2} or more, got {n_tokens}"
        )
    return measure.Window(prefix)

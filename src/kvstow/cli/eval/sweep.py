"""``kvstow eval sweep``: every measure of several arms, into one file of rows.

Each row is the one that the measure's own verb writes with its default window, so either
takes up what the other has measured.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
from click.core import ParameterSource

from kvstow.cli import params as common
from kvstow.cli.eval import kl, needle, params, ppl, profile
from kvstow.cli.eval.run import Bench, bench, chosen_texts, row_shower
from kvstow.cli.eval.unfit import say_unmeasured, unfit_for_model, unfit_for_window
from kvstow.cli.progress import Step, progress_bar
from kvstow.errors import EvaluationError, KvstowError, TextError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import Row
from kvstow.evaluate.selection import of_kind
from kvstow.evaluate.texts import Text
from kvstow.models import read_config
from kvstow.require import require


class Verb(Protocol):
    """What the module of a measure offers."""

    def check_fit(self, limit: int | None, window: Any, /) -> None:
        """Refuse a window beyond the model's context."""

    def questions(
        self, on: Bench, arms: tuple[Arm, ...], texts: Sequence[Text], window: Any, /
    ) -> list[Any]:
        """What `Bench.measure` is to answer."""

    def show(self, rows: list[Row], /) -> None:
        """Print rows for people."""


VERBS: dict[str, Verb] = {"kl": kl, "ppl": ppl, "needle": needle, "profile": profile}
MODULES = {"kl": "kl", "ppl": "perplexity", "needle": "needle", "profile": "profile"}
# The measures that an option is for.
USERS = {
    "arms": ("--arm", {"kl", "ppl", "needle"}),
    "n_texts": ("--texts", {"kl", "ppl", "profile"}),
    "sources": ("--source", {"kl", "ppl", "profile"}),
}


class Part(NamedTuple):
    """One measure of a sweep."""

    name: str
    window: Any
    arms: tuple[Arm, ...]
    texts: list[Text]

    @property
    def verb(self) -> Verb:
        """The module of its own verb."""
        return VERBS[self.name]


@click.command()
@common.model
@click.option(
    "--measure",
    "measures",
    type=click.Choice(list(VERBS)),
    multiple=True,
    default=tuple(VERBS),
    show_default=True,
    help="What to take; may be repeated.",
)
@params.arms(kl.DEFAULT_ARMS)
@params.texts
@params.text_files
@params.sources
@params.dtype
@params.name
@params.output_to(required=True)
@common.as_json
@click.pass_context
def sweep(
    context: click.Context,
    *,
    model: str,
    measures: tuple[str, ...],
    arms: tuple[Arm, ...],
    n_texts: int | None,
    files: tuple[Path, ...],
    sources: tuple[str, ...],
    dtype: str,
    name: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Take every measure of several arms, into one file.

    The rows are those of kvstow eval kl, ppl, needle and profile with the windows that these have
    by default, and rows that the file holds are not measured again. For each arm, kl reads 2,560
    tokens of 16 texts, ppl 8,192, and needle 15,360 of a text of its own.

    What cannot be measured is said on standard error, with the reason, and the rest goes on: an
    arm that the model cannot take, needle where the unquantised model finds less than 80%.
    """
    check_used(context, measures)
    config = read_config(model)
    parts = [
        planned(measure, n_texts=n_texts, files=files, sources=sources, limit=config.context_length)
        for measure in VERBS
        if measure in measures
    ]
    arms = tuple(dict.fromkeys(arms)) if takes_arms(measures) else ()
    unfit = unfit_for_model(config.config, arms, dtype)
    say_unmeasured("", unfit)
    arms = tuple(arm for arm in arms if str(arm) not in unfit)
    parts = list(with_arms(parts, arms))
    if not parts:
        raise nothing()
    with bench(model, arms, dtype=dtype, output=output, name=name) as on:
        rows = measure_all(on, parts, show=row_shower(as_json))
    if not any(rows.values()):
        raise nothing()
    if not as_json:
        measured = [of_one for of_one in rows.values() if of_one]
        for of_one in measured:
            VERBS[of_one[0]["measure"]].show(of_one)
        click.echo("\n".join(next_commands([*chain.from_iterable(measured)], output)))


def check_used(context: click.Context, measures: Sequence[str]) -> None:
    """Refuse an option that none of `measures` uses.

    Raises:
        click.UsageError: If one was given.
    """
    for parameter, (option, users) in USERS.items():
        given = context.get_parameter_source(parameter) is not ParameterSource.DEFAULT
        if given and users.isdisjoint(measures):
            raise click.UsageError(
                f"{option} is for {', '.join(sorted(users))}, and --measure is "
                f"{', '.join(measures)}"
            )


def takes_arms(measures: Sequence[str]) -> bool:
    """Whether any of `measures` does."""
    return not USERS["arms"][1].isdisjoint(measures)


def planned(
    name: str,
    *,
    n_texts: int | None,
    files: Sequence[Path],
    sources: Sequence[str],
    limit: int | None,
) -> Part:
    """The measure called `name`, as its verb takes it by default; no arms yet.

    Raises:
        click.UsageError: If its window is beyond the model's context.
        TextError: As `chosen_texts`.
        MissingDependency: If mlx-lm is not installed.
    """
    window = require(f"kvstow.evaluate.{MODULES[name]}").Window()
    try:
        VERBS[name].check_fit(limit, window)
    except click.UsageError as error:
        raise click.UsageError(
            f"--measure {name}: {error.message}; kvstow eval {name} has windows to choose"
        ) from error
    if name == "needle":
        return Part(name, window, (), chosen_texts(files, needle.SOURCES))
    return Part(name, window, (), chosen_texts(files, sources, n_texts))


def with_arms(parts: Sequence[Part], arms: Sequence[Arm]) -> Iterator[Part]:
    """Those of `parts` that have something to measure, each with the arms it can take."""
    for each in parts:
        if not takes_arms([each.name]):
            yield each
            continue
        unfit = unfit_for_window(arms, each.window.n_attended)
        say_unmeasured(each.name, unfit)
        if fit := tuple(arm for arm in arms if str(arm) not in unfit):
            yield each._replace(arms=fit)


def measure_all(
    on: Bench, parts: Sequence[Part], *, show: Callable[[Row], None]
) -> dict[str, list[Row]]:
    """The rows of each measure, which may be none; what was refused is said.

    Raises:
        TextError: If a text is too short, before anything is measured.
    """
    asked = {part.name: questions(on, part) for part in parts}
    shares = {
        part.name: on.n_unanswered(asked[part.name]) * part.window.n_read(len(part.texts))
        for part in parts
    }
    rows: dict[str, list[Row]] = {}
    done = 0
    with progress_bar("measuring") as step:
        for name, share in shares.items():
            own = asked.pop(name)  # the logits and caches it keeps go when it is done
            bar = _within(step, done, share, sum(shares.values()))
            refused: dict[str, str] = {}
            rows[name] = on.measure(own, show=show, bar=bar, excuse=partial(_note, refused))
            say_unmeasured(name, refused)
            done += share
    return rows


def questions(on: Bench, part: Part) -> list[Any]:
    """For `Bench.measure`.

    Raises:
        TextError: If a text is too short, with the name of the measure.
    """
    try:
        return part.verb.questions(on, part.arms, part.texts, part.window)
    except TextError as error:
        raise TextError(f"--measure {part.name}: {error}") from error


def next_commands(rows: Sequence[Row], output: Path) -> Iterator[str]:
    """What to do with the file, one line each: a figure if one can be drawn, and the report."""
    yield f"All rows are in {output}. To draw and to read them:"
    kind = next((kind for kind in ("kl", "needle") if of_kind(rows, kind)), None)
    if kind:
        yield _command("plot", output, ".svg", "--kind", kind)
    yield _command("report", output, ".html")


def nothing() -> EvaluationError:
    """What a sweep without a row ends with."""
    return EvaluationError("nothing could be measured, for the reasons above")


def _command(verb: str, rows: Path, suffix: str, *options: str) -> str:
    target = Path(f"{rows}{suffix}") if rows.suffix == suffix else rows.with_suffix(suffix)
    return "  " + shlex.join(["kvstow", "eval", verb, str(rows), *options, "--output", str(target)])


def _note(reasons: dict[str, str], question: Row, error: KvstowError) -> None:
    arm = question.get("arm", "")
    reasons[arm] = str(error).removeprefix(f"{arm}: ")


def _within(step: Step, before: int, share: int, total: int) -> Step:
    """Move the bar of the sweep by parts of one measure, weighed by the tokens it reads."""

    def part(done: int, of: int, label: str) -> None:
        step(before + share * done / of, total, label)

    return part

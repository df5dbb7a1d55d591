"""What all measuring verbs do: load a model, and measure the rows that are not there yet."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvstow.blas import use_fast_blas
from kvstow.cli.console import say
from kvstow.cli.progress import Step, progress_bar
from kvstow.cli.refuse import refuse
from kvstow.errors import EvaluationError, KvstowError, UnsupportedModel
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.environment import environment
from kvstow.evaluate.rows import ResultFile, Row
from kvstow.evaluate.texts import Text, bundled, first, read_files
from kvstow.models import load, read_config

N_TEXTS = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """A loaded model, and where its rows go.

    Attributes:
        model: The mlx-lm model.
        tokenizer: Its tokenizer.
        about: What every row says of the model, the machine and the command.
        results: The file of rows.
    """

    model: Any
    tokenizer: Any
    about: Row
    results: ResultFile

    def measure(
        self,
        questions: Sequence[tuple[Row, Callable[[Step], Row]]],
        *,
        show: Callable[[Row], None],
        bar: Step | None = None,
        excuse: Callable[[Row, KvstowError], None] | None = None,
    ) -> list[Row]:
        """Answer each question that the file does not answer yet; returns all rows, in order.

        Args:
            questions: The identity of a row, and the function that measures the rest of it,
                which is told how to move the bar of its own question.
            show: Called with each row as soon as there is one.
            bar: Moves a progress bar; one of its own if None.
            excuse: Told which question has no answer and why, after which the others are asked;
                if None, the first such error ends the run.

        Raises:
            EvaluationError, UnsupportedModel: What a question is refused with.
        """
        rows = []
        done, total = 0, self.n_unanswered(questions)
        with nullcontext(bar) if bar else progress_bar("measuring") as step:
            for identity, answer in questions:
                asked = self._asked(identity)
                row = self.results.find(**asked)
                if row is None:
                    try:
                        measured = answer(_within(step, done, total, asked))
                    except (EvaluationError, UnsupportedModel) as error:
                        if excuse is None:
                            raise
                        excuse(asked, error)
                        continue
                    finally:
                        done += 1
                    row = {**asked, **measured, **self.about}
                    self.results.append(row)
                rows.append(row)
                show(row)
        return rows

    def n_unanswered(self, questions: Sequence[tuple[Row, Any]]) -> int:
        """How many of `questions` the file does not answer yet."""
        return sum(self.results.find(**self._asked(identity)) is None for identity, _ in questions)

    def _asked(self, identity: Row) -> Row:
        return {**identity, **{key: self.about[key] for key in ("model", "dtype")}}


@contextmanager
def bench(
    model: str, arms: Sequence[Arm], *, dtype: str, output: Path | None, name: str | None
) -> Iterator[Bench]:
    """Refuse what cannot be measured, then load the model.

    Raises:
        KvstowError: As `kvstow.load`, `refuse` and `ResultFile`.
    """
    results = ResultFile(output)
    if results.interrupted:
        say(f"{output}: its last row is not whole, it is measured again")
    config = read_config(model)
    refuse(config.config, [arm.scheme for arm in arms], "auto", dtype)
    blas = use_fast_blas()
    say(blas.notice)
    command = " ".join(["kvstow", *sys.argv[1:]])
    with progress_bar("loading") as step:
        loaded, tokenizer = load(model, dtype=dtype, progress=step)
    about = {
        "model": name or Path(model).name,
        "dtype": dtype,
        **environment(command, blas),
    }
    try:
        yield Bench(loaded, tokenizer, about, results)
    except KeyboardInterrupt:
        kept = f"; what was measured is in {output}" if output else ""
        say(f"interrupted{kept}")
        raise


def chosen_texts(
    files: Sequence[Path], sources: Sequence[str], n_texts: int | None = None
) -> list[Text]:
    """The user's own texts, all unless fewer are asked for, or some of the bundled ones.

    Raises:
        TextError: If there are fewer, or one cannot be read.
    """
    texts = read_files(files) if files else bundled(sources)
    return first(texts, n_texts or len(files) or N_TEXTS)


def row_shower(as_json: bool) -> Callable[[Row], None]:
    """What is done with each row: print it as a line of JSON, or nothing, as a table follows."""
    return lambda row: click.echo(json.dumps(row)) if as_json else None


def _within(step: Step, done: int, total: int, asked: Row) -> Step:
    """Move the bar of all questions by parts of one."""
    label = f"{asked['measure']} {asked.get('arm', '')}".strip()

    def part(n: int, of: int) -> None:
        step(done * 1000 + 1000 * n // max(of, 1), total * 1000, label)

    part(0, 1)
    return part

"""``kvstow eval profile --write-policy``: propose a policy at a budget of bytes, and check it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvstow.cli.console import say
from kvstow.cli.eval import kl
from kvstow.cli.eval.run import Bench, row_shower
from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import Row
from kvstow.evaluate.statistics import ratio_interval
from kvstow.evaluate.texts import Text, passages
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Turbo


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options ask for.

    Attributes:
        path: Where the policy is written.
        budget: The scheme whose bytes it may take, and whose options its schemes have.
    """

    path: Path
    budget: Turbo

    def check(self, texts: Sequence[Text]) -> None:
        """Refuse what would fail when all is measured.

        Raises:
            click.UsageError: If the file cannot be written, or there is no text to check on.
        """
        if len(texts) < 2:
            raise click.UsageError(
                "--write-policy needs two texts or more, half to choose by and half to check on, "
                f"got {len(texts)}"
            )
        folder = self.path.parent
        if not folder.is_dir():
            raise click.UsageError(f"--write-policy: there is no directory {folder}")


def propose(
    on: Bench, texts: Sequence[Text], window: Any, wanted: Wanted, *, as_json: bool
) -> None:
    """Measure what widths cost in every layer, write the policy, and measure that.

    Args:
        on: The model, and where rows go.
        texts: The first half is what the policy is chosen by, the rest what it is checked on.
        window: Of `kvstow.evaluate.kl`.
        wanted: What is proposed.
        as_json: Whether rows are printed in the place of tables.

    Raises:
        EvaluationError: If a measurement means nothing.
    """
    allocation = require("kvstow.evaluate.allocation")
    half = len(texts) // 2
    choose, check = texts[:half], texts[half:]
    show = row_shower(as_json)
    layers = allocation.full_layers(on.model)
    arms = allocation.probes(layers, wanted.budget)
    rows = on.measure(kl.questions(on, arms, choose, window), show=show)
    costs = allocation.costs(
        on.model,
        passages(on.tokenizer, choose, window.n_tokens),
        {row["arm"]: row["mean_kl_nats"] for row in rows},
        wanted.budget,
    )
    uniform = allocation.predicted(costs, Policy(wanted.budget))
    policy = allocation.allocate(costs, allocation.candidates(wanted.budget), uniform.n_bytes)
    content = json.dumps(policy.as_dict(), indent=2) + "\n"
    try:
        wanted.path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write the policy: {error}") from error
    both = (Arm(wanted.budget), Arm(policy))
    rows = on.measure(kl.questions(on, both, check, window), show=show)
    if not as_json:
        kl.show(rows)
    say(verdict(rows, wanted, [uniform, allocation.predicted(costs, policy)]))


def verdict(rows: Sequence[Row], wanted: Wanted, predicted: Sequence[Any]) -> str:
    """What was written, and whether it is better, a few lines."""
    even, chosen = rows
    per_text = [np.array(row["per_text_kl_nats"]) for row in (chosen, even)]
    ratio = per_text[0].mean() / per_text[1].mean()
    low, high = ratio_interval(*per_text)
    bytes_of = [cost.n_bytes for cost in predicted]
    n = even["texts"]["n_texts"]
    lines = [
        f"wrote {wanted.path}: {bytes_of[1]:,} bytes per token, {wanted.budget} takes "
        f"{bytes_of[0]:,}",
        f"KL {ratio:.2f} of that of {wanted.budget} (95% interval {low:.2f} to {high:.2f}) on "
        f"{n} other texts; {predicted[1].nats / predicted[0].nats:.2f} was predicted",
    ]
    if high >= 1:
        lines.append("this does not show that the policy is better: measure more texts")
    return "\n".join(lines)

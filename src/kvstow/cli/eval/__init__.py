"""``kvstow eval``: what each scheme costs in quality, on the user's own model.

One file per verb. Verbs that measure load a model and append rows to a file; `plot` and
`report` read such files and nothing else.
"""

import click

from kvstow.cli.lazy import LazyGroup

COMMANDS = {
    "kl": ("kvstow.cli.eval.kl", "KL of the next token against the unquantised model."),
    "ppl": ("kvstow.cli.eval.ppl", "Perplexity of texts read through the quantised cache."),
    "needle": ("kvstow.cli.eval.needle", "Retrieval of a fact planted in a long text."),
    "profile": (
        "kvstow.cli.eval.profile",
        "Say how hard a model's keys are, layer by layer.",
    ),
    "diff": ("kvstow.cli.eval.diff", "Show where the answers of two arms part."),
    "sweep": ("kvstow.cli.eval.sweep", "Take every measure of several arms, into one file."),
    "plot": ("kvstow.cli.eval.plot", "Draw rows of results as a figure, without a model."),
    "report": (
        "kvstow.cli.eval.report",
        "Write rows of results as one HTML page, without a model.",
    ),
}


@click.group("eval", cls=LazyGroup, commands=COMMANDS)
def eval_command() -> None:
    """Measure what each scheme costs in quality, on your own model.

    An arm is a scheme, or a part of one: turbo:k8v3, turbo:k8v3@eager, turbo:k4v3@keys
    (only keys quantised), turbo:k8v3@layer5, turbo:k8v3@full (no sliding windows), affine:4g32,
    off@bfloat16 (the noise floor), paper:mse4, paper:prod4. Results are appended to --output
    as they come, one JSON row each, and an interrupted run goes on where it stopped.
    """

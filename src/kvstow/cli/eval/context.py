"""Refuse what does not fit in the model's context, before any weights are loaded."""

import click

from kvstow.models import read_config


def check_context(model: str, option: str, tokens: int, more: int = 0) -> None:
    """Refuse more tokens than `model` was made for.

    Args:
        model: As `kvstow.load` takes it.
        option: The flag that asked for them.
        tokens: Its value.
        more: Tokens that follow those.

    Raises:
        click.UsageError: If the config says that they do not fit.
        ModelNotFound: As `read_config`, and its other errors.
    """
    limit = read_config(model).context_length
    if limit is not None and tokens + more > limit:
        following = f" and {more} tokens of an answer do" if more else " does"
        raise click.UsageError(
            f"{option} {tokens}{following} not fit in the model's context of {limit} tokens"
        )

"""Refusals before any weights are downloaded, converted or loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvstow.errors import PolicyError, UnsupportedModel
from kvstow.integrations import attached
from kvstow.integrations.report import Fetch, fetch_of, has_turbo
from kvstow.models import skeleton
from kvstow.policy import Policy
from kvstow.scheme import Off, Scheme


def check_fetch(fetch: Fetch, schemes: Sequence[Scheme | Policy]) -> None:
    """Refuse a path that would apply to nothing.

    Raises:
        click.UsageError: If there is no turbo scheme to fetch under.
    """
    if fetch != "auto" and not any(map(has_turbo, schemes)):
        got = ", ".join(map(str, schemes))
        raise click.UsageError(f"--fetch {fetch} needs a turbo scheme, got --kv-quant {got}")


def check_context(
    limit: int | None, option: str, tokens: int, more: int = 0, what: str = ""
) -> None:
    """Refuse more tokens than a model was made for.

    Args:
        limit: The model's context, where its config says.
        option: The flag that asked for them.
        tokens: Its value.
        more: Tokens that follow those.
        what: Their name.

    Raises:
        click.UsageError: If they do not fit.
    """
    if limit is not None and tokens + more > limit:
        asked = f"{option} {tokens}" + (f" and {more} {what} do" if more else " does")
        raise click.UsageError(f"{asked} not fit in the model's context of {limit} tokens")


def refuse(
    config: Mapping[str, Any], schemes: Sequence[Scheme | Policy], fetch: Fetch, dtype: str | None
) -> None:
    """Refuse a model that none of `schemes` but ``off`` can store.

    Args:
        config: As in config.json; any may run where nothing is quantised.
        schemes: What the loaded model will be attached to, in turn.
        fetch: Of the turbo schemes.
        dtype: See `skeleton`.

    Raises:
        ModelFileError: As `skeleton`.
        UnsupportedModel: The first refusal of `attach`, if no scheme escapes one.
        click.UsageError: If a policy is about layers that the model does not have.
    """
    quantising = [s for s in schemes if not isinstance(Policy.of(s).uniform, Off)]
    if not quantising:
        return
    model = skeleton(config, dtype)
    refusals = [error for s in quantising if (error := _refusal(model, s, fetch))]
    if len(refusals) == len(quantising):
        raise refusals[0]


def _refusal(model: Any, scheme: Scheme | Policy, fetch: Fetch) -> UnsupportedModel | None:
    # Eager runs wherever auto finds a path, and needs no kernel to be checked.
    path = fetch_of(scheme, "eager" if fetch == "auto" else fetch)
    try:
        with attached(model, scheme, fetch=path):
            return None
    except PolicyError as error:
        raise click.UsageError(str(error)) from error
    except UnsupportedModel as error:
        return error

"""Refusals before any weights are downloaded, converted or loaded."""

from collections.abc import Mapping
from typing import Any

from kvstow.integrations import attached
from kvstow.integrations.report import Fetch
from kvstow.models import skeleton
from kvstow.scheme import Off, Scheme


def refuse(
    config: Mapping[str, Any], scheme: Scheme, fetch: Fetch = "auto", dtype: str | None = None
) -> None:
    """Raise what `attach` would on the model of this config; any model may run without a scheme.

    Args:
        config: As in config.json.
        scheme: What the model would be attached to.
        fetch: See `kvstow.attach`.
        dtype: See `skeleton`.

    Raises:
        MissingDependency: As `skeleton`.
        ModelFileError: As `skeleton`.
        UnsupportedModel: As `skeleton` and `attach`.
    """
    if not isinstance(scheme, Off):
        with attached(skeleton(config, dtype), scheme, fetch=fetch):
            pass

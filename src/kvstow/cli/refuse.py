"""Refusals before any weights are downloaded, converted or loaded."""

from typing import Any

from kvstow.integrations import attached
from kvstow.integrations.report import Fetch
from kvstow.scheme import Off, Scheme


def refuse(model: Any, scheme: Scheme, fetch: Fetch = "auto") -> None:
    """Raise what `attach` would; any model may run without a scheme.

    Args:
        model: A `kvstow.models.skeleton`.
        scheme: What the loaded model would be attached to.
        fetch: See `kvstow.attach`.

    Raises:
        UnsupportedModel: As `attach`.
    """
    if not isinstance(scheme, Off) or fetch != "auto":
        with attached(model, scheme, fetch=fetch):
            pass

"""Import what the extra ``eval`` installs, and name that extra when it is missing."""

from typing import Any

from kvstow.errors import MissingDependency
from kvstow.require import require


def require_extra(module: str) -> Any:
    """The module called `module`, imported now; see `kvstow.require.require`.

    Raises:
        MissingDependency: If it, or something that it imports, cannot be imported.
    """
    try:
        return require(module)
    except MissingDependency as error:
        cause = error.__cause__
        package = (getattr(cause, "name", None) or module).partition(".")[0]
        raise MissingDependency(
            f"figures and reports need {package}: pip install 'kvstow[eval]' ({cause})"
        ) from error

"""Import an optional dependency when it is needed, and name the command when it is missing."""

import importlib
from typing import Any

from kvstow.errors import MissingDependency


def require(module: str, *, extra: str = "mlx") -> Any:
    """The module called `module`, imported now.

    Args:
        module: It may be one of kvstow's own that imports an optional dependency at its top.
        extra: The extra of kvstow that installs the dependency.

    Raises:
        MissingDependency: If it, or something that it imports, cannot be imported.
        ImportError: If kvstow itself has no such module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
        if package == __package__:  # a mistake in kvstow, which nothing installs away
            raise
        raise MissingDependency(
            f"this needs {package}: pip install 'kvstow[{extra}]' ({error})"
        ) from error

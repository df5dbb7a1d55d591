"""Import an optional dependency when it is needed, and name the command when it is missing."""

import importlib
from typing import Any

from kvstow.errors import MissingDependency


def require(module: str, extra: str = "mlx") -> Any:
    """The module called `module`, imported now.

    Raises:
        MissingDependency: If it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"loading models needs {module.partition('.')[0]}: "
            f"pip install 'kvstow[{extra}]' ({error})"
        ) from error

"""Models: where weights come from.

`load` takes a bundled demo model, a GGUF file, a directory or a hub id.
Importing this package imports no framework.
"""

from kvstow.models.load import load

__all__ = ["load"]

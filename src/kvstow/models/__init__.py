"""Models: where weights come from.

`load` takes a bundled demo model, a GGUF file, a directory or a hub id, and
`read_config` reads the same model's config without its weights. Importing this
package imports no framework.
"""

from kvstow.models.config import ModelConfig, context_length, read_config
from kvstow.models.load import load

__all__ = ["ModelConfig", "context_length", "load", "read_config"]

"""Models: where weights come from.

`load` takes a bundled demo model, a GGUF file, a directory or a hub id,
`read_config` reads the same model's config without its weights, and `skeleton`
makes the model of a config, for questions that need no weights. Importing this
package imports no framework.
"""

from kvstow.models.config import ModelConfig, context_length, read_config
from kvstow.models.load import default_dtype, load
from kvstow.models.skeleton import skeleton

__all__ = ["ModelConfig", "context_length", "default_dtype", "load", "read_config", "skeleton"]

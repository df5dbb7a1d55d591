"""Read a model's config without its weights, for `kvstow fit` and for refusals before a load.

For a GGUF file the config is made from the metadata, for a directory it is
config.json, and for a hub id config.json alone is downloaded. Imports no mlx.
"""

import fnmatch
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.errors import ModelFileError, ModelNotFound
from kvstow.models.architectures import make_config
from kvstow.models.gguf_file import read_gguf
from kvstow.models.locate import ALLOWED, WEIGHTS, Source, locate
from kvstow.models.weights import kept_tensors
from kvstow.require import require

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is known of a model before its weights are loaded.

    Args:
        source: Where it comes from.
        config: mlx-lm's config, as in config.json.
        weight_bytes: Size of the weights as stored; None when unknown.
        n_weights: Number of weights of a GGUF file, which are converted to another dtype
            when they are loaded; None for other sources, which are loaded as stored.
    """

    source: Source
    config: dict[str, Any]
    weight_bytes: int | None = None
    n_weights: int | None = None

    @property
    def context_length(self) -> int | None:
        """See `context_length`."""
        return context_length(self.config)


def read_config(model: str) -> ModelConfig:
    """Read the config of `model`, which is anything that `kvstow.models.load` takes.

    Raises:
        MissingDependency: If gguf or huggingface_hub is needed and not installed.
        ModelNotFound: If nothing is where `model` points.
        ModelFileError: If what is there has no readable config.
    """
    source = locate(model)
    if source.path is None:
        return ModelConfig(source, hub_config(source.name), _hub_weight_bytes(source.name))
    if source.kind == "gguf":
        gguf = read_gguf(source.path)
        tensors = kept_tensors(gguf)
        n_bytes = sum(tensor.n_bytes for tensor in tensors)
        return ModelConfig(source, make_config(gguf), n_bytes, sum(t.size for t in tensors))
    n_bytes = sum(file.stat().st_size for file in source.path.glob(WEIGHTS))
    return ModelConfig(source, read_config_json(source.path / "config.json"), n_bytes)


def context_length(config: dict[str, Any]) -> int | None:
    """Tokens that a model of this config was made for; None when the config does not say.

    >>> context_length({"max_position_embeddings": 8192})
    8192
    """
    inner = config.get("text_config")
    for part in (config, inner) if isinstance(inner, dict) else (config,):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ModelFileError: If it cannot be read, or names no model_type.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelFileError(f"{path} is no model's config: expected an object with a model_type")
    return config


def hub_config(name: str) -> dict[str, Any]:
    """Download and read the config.json of a hub id.

    Raises:
        ModelNotFound: If the hub cannot be reached or has no such model.
    """
    hub = require("huggingface_hub")
    try:
        path = hub.hf_hub_download(name, "config.json")
    except Exception as error:  # the errors of its HTTP client differ between versions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"{name!r} is no file or directory here, and cannot be had from the Hugging Face hub: "
            f"{reason} (expected {ALLOWED})"
        ) from error
    return read_config_json(Path(path))


def _hub_weight_bytes(name: str) -> int | None:
    try:
        info = require("huggingface_hub").HfApi().model_info(name, files_metadata=True)
    except Exception:  # offline, say: the size is a convenience
        return None
    sizes = [file.size for file in info.siblings if fnmatch.fnmatch(file.rfilename, WEIGHTS)]
    return sum(sizes) if sizes and None not in sizes else None

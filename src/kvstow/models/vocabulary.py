"""A model's vocabulary without its weights, to see whether two models share a tokenizer.

Of a GGUF file it is in the metadata, of a directory in tokenizer.json, of a hub id in
that file alone, which is downloaded. Imports no mlx.
"""

import json
from pathlib import Path
from typing import Any

from kvstow.errors import ModelFileError
from kvstow.models.gguf_file import read_gguf
from kvstow.models.locate import Source
from kvstow.require import require


def read_vocabulary(source: Source) -> dict[str, int] | None:
    """Token to id, as the tokenizer spells its tokens; None where only the tokenizer knows.

    Args:
        source: Where the model is; see `kvstow.models.locate`.

    Raises:
        MissingDependency: If gguf or huggingface_hub is needed and not installed.
        ModelFileError: If what is there is damaged.
    """
    if source.kind == "gguf" and source.path is not None:
        tokens = read_gguf(source.path).array("tokenizer.ggml.tokens", str) or []
        return {token: index for index, token in enumerate(tokens)} or None
    path = _hub_file(source.name) if source.path is None else source.path / "tokenizer.json"
    return _read(path) if path is not None and path.exists() else None


def _hub_file(name: str) -> Path | None:
    try:
        return Path(require("huggingface_hub").hf_hub_download(name, "tokenizer.json"))
    except (OSError, ValueError):  # it may have another kind of tokenizer, or none
        return None


def _read(path: Path) -> dict[str, int] | None:
    try:
        content: Any = json.loads(path.read_text("utf-8"))
        listed: Any = content["model"]["vocab"]
        if isinstance(listed, list):  # of pairs: a piece and its score
            listed = {piece: index for index, (piece, _) in enumerate(listed)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path} is damaged: {error!r}") from error
    return {**listed, **added} or None

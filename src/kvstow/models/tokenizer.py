"""Build the tokenizer that a GGUF file describes, and save it as transformers reads it.

transformers has a builder for GGUF vocabularies; its usual way in asks for
torch, the builder itself does not.
"""

from pathlib import Path
from typing import Any

from kvstow.errors import ModelFileError
from kvstow.models.gguf_file import GgufFile
from kvstow.require import require

_PREFIX = "tokenizer.ggml."
# transformers' word for each of the file's keys, where they differ
_BUILDER_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
}
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def save_tokenizer(gguf: GgufFile, architecture: str, folder: Path) -> None:
    """Write tokenizer.json, its config and the chat template of `gguf` into `folder`.

    Raises:
        ModelFileError: If the file has no vocabulary, or one of an unknown kind.
    """
    mapping = require("transformers.integrations.gguf.gguf_tokenizer_mapping")
    transformers = require("transformers")
    told = {
        key.removeprefix(_PREFIX): value
        for key, value in gguf.metadata.items()
        if key.startswith(_PREFIX)
    }
    if not told.get("tokens"):
        raise ModelFileError(f"{gguf.path} has no vocabulary ({_PREFIX}tokens)")
    names = {name: _token(gguf, told, key) for name, key in _SPECIAL.items()}
    try:
        backend, _ = mapping.convert_gguf_tokenizer(
            architecture, {_BUILDER_KEYS.get(key, key): value for key, value in told.items()}
        )
    except (KeyError, ValueError) as error:
        raise ModelFileError(f"{gguf.path}: no tokenizer can be built from it: {error}") from error
    if told.get("pre") == "smollm":
        backend.pre_tokenizer = _smollm_split()
    # Sentencepiece vocabularies begin with BOS unless the file says otherwise.
    if told.get("add_bos_token", told.get("model") == "llama") and names["bos_token"]:
        backend.post_processor = require("tokenizers.processors").TemplateProcessing(
            single=f"{names['bos_token']} $A",
            special_tokens=[(names["bos_token"], told["bos_token_id"])],
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names
    )
    tokenizer.chat_template = gguf.metadata.get("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


def _token(gguf: GgufFile, told: dict[str, Any], key: str) -> str | None:
    index = told.get(key)
    if index is None:
        return None
    if not 0 <= index < len(told["tokens"]):
        raise ModelFileError(
            f"{gguf.path} is damaged: {_PREFIX}{key} is {index}, "
            f"the vocabulary has {len(told['tokens'])} tokens"
        )
    return str(told["tokens"][index])


def _smollm_split() -> Any:
    """Digits one by one, then GPT-2's split; transformers' table lacks this one."""
    split = require("tokenizers.pre_tokenizers")
    return split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )

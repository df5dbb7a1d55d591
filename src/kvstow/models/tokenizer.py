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
    tokens = gguf.array(f"{_PREFIX}tokens", str)
    if not tokens:
        raise ModelFileError(f"{gguf.path} has no vocabulary ({_PREFIX}tokens)")
    names = {name: _token(gguf, tokens, _PREFIX + key) for name, key in _SPECIAL.items()}
    kind, pre = gguf.get(f"{_PREFIX}model", str), gguf.get(f"{_PREFIX}pre", str)
    # Sentencepiece vocabularies begin with BOS unless the file says otherwise.
    add_bos = gguf.get(f"{_PREFIX}add_bos_token", bool)
    add_bos = kind == "llama" if add_bos is None else add_bos
    template = gguf.get("tokenizer.chat_template", str)
    try:
        backend, _ = mapping.convert_gguf_tokenizer(
            architecture, {_BUILDER_KEYS.get(key, key): value for key, value in told.items()}
        )
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise ModelFileError(f"{gguf.path}: no tokenizer can be built from it: {error}") from error
    if pre == "smollm":
        backend.pre_tokenizer = _smollm_split()
    if add_bos and names["bos_token"]:
        backend.post_processor = require("tokenizers.processors").TemplateProcessing(
            single=f"{names['bos_token']} $A",
            special_tokens=[(names["bos_token"], told["bos_token_id"])],
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def _token(gguf: GgufFile, tokens: list[str], key: str) -> str | None:
    index = gguf.get(key, int)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelFileError(
            f"{gguf.path} is damaged: {key} is {index}, the vocabulary has {len(tokens)} tokens"
        )
    return tokens[index]


def _smollm_split() -> Any:
    """Digits one by one, then GPT-2's split; transformers' table lacks this one."""
    split = require("tokenizers.pre_tokenizers")
    return split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )

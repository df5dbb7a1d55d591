"""Tiny GGUF files of the four architectures, written with llama.cpp's own writer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 256, 4, 2, 64, 96, 256
LAYERS = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma3": 6}  # gemma3: one that is not sliding
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"

LAYER_TENSORS = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
QK_NORMS = {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
EXTRA = {
    "llama": {},
    "qwen2": {},
    "qwen3": QK_NORMS,
    "gemma3": QK_NORMS | {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)},
}


def byte_level_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """GPT-2's: a letter for each byte, one merge, one ordinary and two control tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = dict(zip(printable, map(chr, printable), strict=True))
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)] + ["hi", "<s>", "</s>", "<|im_end|>"]
    return tokens, [1] * 257 + [3] * 3, ["h i"]


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [3, 3, 3, 2] + [6] * 256
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "hi", "\u2581hi"]
    return tokens + pieces, kinds + [1] * len(pieces), [-float(i) for i in range(260 + len(pieces))]


def vocabulary_size(architecture: str) -> int:
    if architecture == "gemma3":
        return len(sentencepiece_vocabulary()[0])
    return len(byte_level_vocabulary()[0])


def random_tensors(architecture: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (vocabulary_size(architecture), HIDDEN)}
    shapes["output_norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS[architecture]):
        for stem, shape in (LAYER_TENSORS | EXTRA[architecture]).items():
            shapes[f"blk.{layer}.{stem}.weight"] = shape
        if architecture == "qwen2":
            for stem in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{layer}.{stem}.bias"] = LAYER_TENSORS[stem][:1]
    return {
        name: (rng.standard_normal(shape) * 0.1 + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def add_vocabulary(writer: Any, architecture: str) -> None:
    if architecture == "gemma3":
        tokens, kinds, scores = sentencepiece_vocabulary()
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(2)
    else:
        tokens, kinds, merges = byte_level_vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(merges)
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


TinyGguf = Callable[..., Path]


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> TinyGguf:
    """See `gguf_writer`."""
    return gguf_writer(tmp_path)


def gguf_writer(folder: Path, chat_template: str = CHAT_TEMPLATE) -> TinyGguf:
    """A function that writes a tiny model into `folder`.

    Its `tensors` replaces (an array) or drops (None) some of the model's own.
    """

    def write(
        architecture: str = "llama",
        *,
        named: str | None = None,
        tensors: dict[str, Any] | None = None,
        quantise: Any = None,
        metadata: Callable[[Any], None] | None = None,
        seed: int = 0,
    ) -> Path:
        path = folder / f"{named or architecture}-{seed}.gguf"
        writer = gguf.GGUFWriter(path, named or architecture)
        writer.add_block_count(LAYERS[architecture])
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        if architecture == "gemma3":
            writer.add_sliding_window(32)
        add_vocabulary(writer, architecture)
        if chat_template:
            writer.add_chat_template(chat_template)
        if metadata is not None:
            metadata(writer)
        for name, array in (random_tensors(architecture, seed) | (tensors or {})).items():
            if array is None:
                continue
            if quantise is not None and array.ndim == 2:
                packed = gguf.quants.quantize(array, quantise)
                writer.add_tensor(name, packed, raw_dtype=quantise)
            else:
                writer.add_tensor(name, array)
        finish(writer)
        return path

    return write


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("KVSTOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"

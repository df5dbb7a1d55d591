"""llama.cpp's four text architectures in mlx-lm's words: names, config, layout of weights.

Three things differ beside the names. llama.cpp interleaves the rows of llama's
query and key projections for its rotary embedding; it stores gemma's norms as
``1 + weight``; and it stores llama 3's rotary scaling as a table of factors.
"""

import math
import re
from typing import Any

import numpy as np

from kvstow.errors import ModelFileError
from kvstow.models.gguf_file import GgufFile

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3 = {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3 = {
    **_QWEN3,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYERS = {"llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _QWEN3, "gemma3": _GEMMA3}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
ROPE_FACTORS = "rope_freqs.weight"

# Tokens that end a turn whatever the file's eos_token_id says.
END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
_CONTROL = 3  # token_type of special tokens

# What Llama 3.1 and later share; only the factor differs between them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def architecture_of(gguf: GgufFile) -> str:
    """The file's architecture, one of `MODEL_TYPES`.

    Raises:
        ModelFileError: If it is another one.
    """
    architecture = gguf.text("general.architecture")
    if architecture not in MODEL_TYPES:
        raise ModelFileError(
            f"{gguf.path} has the architecture {architecture!r}; "
            f"expected one of {', '.join(MODEL_TYPES)}"
        )
    return architecture


def mlx_name(architecture: str, name: str) -> str | None:
    """mlx-lm's name of the tensor that llama.cpp calls `name`; None when it has none.

    >>> mlx_name("llama", "blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    stem, _, suffix = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        part = LAYERS[architecture].get(match[2])
        return part and f"model.layers.{match[1]}.{part}.{suffix}"
    part = _TOP.get(stem)
    return part and f"{part}.{suffix}"


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a projection's rows, from interleaved pairs to two halves.

    Whole rows move, so this holds for packed rows as well as for numbers.
    """
    pairs = rows.reshape(n_heads, len(rows) // n_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def make_config(gguf: GgufFile) -> dict[str, Any]:
    """The config.json that mlx-lm needs for the model in `gguf`.

    Raises:
        ModelFileError: If the architecture is another one, or metadata or tensors are missing.
    """
    architecture = architecture_of(gguf)
    n_heads = _integer(gguf, "attention.head_count")
    hidden_size = _integer(gguf, "embedding_length")
    n_layers = _integer(gguf, "block_count")
    _check_tensors(gguf, architecture, n_layers)
    head_dim = _integer(gguf, "attention.key_length", hidden_size // n_heads)
    if (rotated := _integer(gguf, "rope.dimension_count", head_dim)) != head_dim:
        raise ModelFileError(f"{gguf.path} rotates {rotated} of {head_dim} elements: expected all")
    config = {
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": hidden_size,
        "num_hidden_layers": n_layers,
        "intermediate_size": _integer(gguf, "feed_forward_length"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": _integer(gguf, "attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(gguf, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _decimal(gguf, "rope.freq_base", 10000.0),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": _integer(gguf, "context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _end_tokens(gguf),
        "rope_scaling": _rope_scaling(gguf),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    if architecture == "gemma3":
        config |= _gemma3_config(gguf, config)
    return config


def _gemma3_config(gguf: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    # The 27B model, known by its depth, scales queries by its width per head.
    is_27b = config["num_hidden_layers"] == 62
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": _integer(gguf, "attention.sliding_window"),
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "rope_theta": _decimal(gguf, "rope.freq_base", 1e6),
        "rope_local_base_freq": 10000.0,
    }


def _integer(gguf: GgufFile, key: str, default: int | None = None) -> int:
    return gguf.integer(f"{architecture_of(gguf)}.{key}", default)


def _decimal(gguf: GgufFile, key: str, default: float | None = None) -> float:
    # The file holds float32; the number that was meant has few digits.
    return float(f"{gguf.positive(f'{architecture_of(gguf)}.{key}', default):.6g}")


def _check_tensors(gguf: GgufFile, architecture: str, n_layers: int) -> None:
    needed = {"token_embd.weight", "output_norm.weight"}
    stems = [f"{stem}.weight" for stem in LAYERS[architecture]]
    if architecture == "qwen2":
        stems += ["attn_q.bias", "attn_k.bias", "attn_v.bias"]
    n_layers = min(n_layers, len(gguf.tensors) + 1)  # a damaged number may be in the billions
    needed |= {f"blk.{layer}.{stem}" for layer in range(n_layers) for stem in stems}
    if missing := sorted(needed - gguf.tensors.keys()):
        raise ModelFileError(
            f"{gguf.path} lacks {len(missing)} of its tensors, such as {missing[0]!r}"
        )
    for name in gguf.tensors:
        if name != ROPE_FACTORS and mlx_name(architecture, name) is None:
            raise ModelFileError(
                f"{gguf.path}: a plain {architecture} model has no tensor {name!r} "
                "(a mixture of experts or another variant is not supported)"
            )


def _end_tokens(gguf: GgufFile) -> list[int]:
    named = [gguf.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot")]
    ids = {index for index in named if index is not None}
    tokens = gguf.array("tokenizer.ggml.tokens", str)
    kinds = gguf.array("tokenizer.ggml.token_type", int)
    pairs = enumerate(zip(tokens, kinds, strict=False))
    ids |= {i for i, (token, kind) in pairs if kind == _CONTROL and token in END_OF_TURN}
    return sorted(ids)


def _rope_scaling(gguf: GgufFile) -> dict[str, Any] | None:
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf)
    kind = gguf.text(f"{architecture_of(gguf)}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": _decimal(gguf, "rope.scaling.factor")}
    raise ModelFileError(
        f"{gguf.path}: rope scaling must be none, linear or llama 3's table; got {kind!r}"
    )


def _llama3_scaling(gguf: GgufFile) -> dict[str, Any]:
    tensor = gguf.tensors[ROPE_FACTORS]
    if tensor.kind.name != "F32" or not tensor.size:
        raise ModelFileError(f"{gguf.path} is damaged: {ROPE_FACTORS!r} must hold float32 numbers")
    stored = np.fromfile(gguf.path, np.float32, tensor.size, offset=tensor.start)
    scaling = {"rope_type": "llama3", "factor": float(f"{stored.max():.6g}"), **_LLAMA3}
    expected = llama3_factors(2 * tensor.size, _decimal(gguf, "rope.freq_base", 10000.0), scaling)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise ModelFileError(
            f"{gguf.path}: the rotary factors in {ROPE_FACTORS!r} are not those of Llama 3"
        )
    return scaling


def llama3_factors(head_dim: int, base: float, scaling: dict[str, Any]) -> np.ndarray:
    """How much longer Llama 3 makes each rotary wavelength; 1 leaves it alone.

    Wavelengths under ``original / high_freq_factor`` are kept, those over
    ``original / low_freq_factor`` are stretched by ``factor``, and between
    them the frequency is interpolated.
    """
    wavelengths = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    kept = np.clip(kept, 0, 1)
    factors: np.ndarray = 1 / ((1 - kept) / scaling["factor"] + kept)
    return factors

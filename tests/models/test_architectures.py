import numpy as np
import pytest

from kvstow import ModelFileError
from kvstow.models.architectures import (
    LAYERS,
    MODEL_TYPES,
    llama3_factors,
    make_config,
    mlx_name,
    unpermute,
)
from kvstow.models.gguf_file import read_gguf

HEAD_DIM = 64
SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def permute(rows, n_heads):
    """The order in which llama.cpp's converter writes query and key projections."""
    halves = rows.reshape(n_heads, 2, len(rows) // n_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("n_heads", [1, 3, 9])
def test_unpermute_undoes_llama_cpps_order_exactly(n_heads):
    rows = np.random.default_rng(0).standard_normal((n_heads * 64, 48))
    assert not np.array_equal(permute(rows, n_heads), rows)
    np.testing.assert_array_equal(unpermute(permute(rows, n_heads), n_heads), rows)


def test_a_bias_is_unpermuted_as_the_rows_it_is_added_to():
    rows = np.arange(128.0).reshape(128, 1)
    bias = unpermute(permute(rows, 2), 2)
    np.testing.assert_array_equal(bias, rows)


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "mamba"])
def test_another_architecture_is_refused_with_the_four_allowed(tiny_gguf, architecture):
    path = tiny_gguf(named=architecture)
    with pytest.raises(
        ModelFileError, match=f"'{architecture}'; expected one of {', '.join(LAYERS)}"
    ):
        make_config(read_gguf(path))


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_the_config_holds_the_files_dimensions(tiny_gguf, architecture):
    config = make_config(read_gguf(tiny_gguf(architecture)))
    assert config["model_type"] == MODEL_TYPES[architecture]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["hidden_size"], config["head_dim"]) == (256, 64)
    assert config["max_position_embeddings"] == 256
    assert config["rms_norm_eps"] == 1e-6
    assert config["tie_word_embeddings"]


def test_tokens_that_end_a_turn_stop_generation_beside_the_files_own(tiny_gguf):
    assert make_config(read_gguf(tiny_gguf()))["eos_token_id"] == [258, 259]  # </s>, <|im_end|>


def test_a_head_of_its_own_unties_the_embeddings(tiny_gguf):
    head = np.zeros((260, 256), np.float32)
    gguf = read_gguf(tiny_gguf(tensors={"output.weight": head}))
    assert not make_config(gguf)["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, r"lacks 1 of its tensors, such as 'blk.1.ffn_up.weight'"),
        ({"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}, "mixture of experts"),
        ({"rope_freqs.weight": np.linspace(1, 5, 32, dtype=np.float32)}, "not those of Llama 3"),
    ],
)
def test_tensors_that_do_not_make_the_plain_model_are_refused(tiny_gguf, tensors, message):
    with pytest.raises(ModelFileError, match=message):
        make_config(read_gguf(tiny_gguf(tensors=tensors)))


def test_missing_metadata_is_named(tiny_gguf):
    path = tiny_gguf()
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_hount"))
    with pytest.raises(ModelFileError, match=r"lacks the metadata 'llama\.block_count'"):
        make_config(read_gguf(path))


def test_a_rotary_embedding_of_part_of_the_head_is_refused(tiny_gguf):
    path = tiny_gguf(metadata=lambda writer: writer.add_rope_dimension_count(32))
    with pytest.raises(ModelFileError, match="rotates 32 of 64"):
        make_config(read_gguf(path))


def test_yarn_is_refused_and_linear_scaling_is_kept(tiny_gguf):
    def scaled(kind):
        def add(writer):
            writer.add_string("llama.rope.scaling.type", kind)
            writer.add_rope_scaling_factor(4.0)

        return add

    linear = make_config(read_gguf(tiny_gguf(metadata=scaled("linear"))))
    assert linear["rope_scaling"] == {"type": "linear", "factor": 4.0}
    with pytest.raises(ModelFileError, match="got 'yarn'"):
        make_config(read_gguf(tiny_gguf(metadata=scaled("yarn"))))


def test_llama_3s_table_of_factors_becomes_its_rope_scaling(tiny_gguf):
    factors = llama3_factors(HEAD_DIM, 10000.0, SCALING).astype(np.float32)
    config = make_config(read_gguf(tiny_gguf(tensors={"rope_freqs.weight": factors})))
    assert config["rope_scaling"] == {"rope_type": "llama3", **SCALING}


@pytest.mark.mlx
def test_llama_3s_factors_are_those_that_mlx_lm_applies():
    rope_utils = pytest.importorskip("mlx_lm.models.rope_utils")
    rope = rope_utils.Llama3RoPE(HEAD_DIM, base=500000.0, scaling_config=SCALING)
    plain = 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = llama3_factors(HEAD_DIM, 500000.0, SCALING)
    np.testing.assert_allclose(np.array(rope._freqs), plain * factors, rtol=1e-5)  # float32


def test_a_tensor_without_a_counterpart_has_no_name():
    assert mlx_name("llama", "blk.0.attn_q_norm.weight") is None
    assert mlx_name("qwen3", "blk.0.attn_q_norm.weight") == (
        "model.layers.0.self_attn.q_norm.weight"
    )

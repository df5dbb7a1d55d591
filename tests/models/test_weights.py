import json

import numpy as np
import pytest

from kvstow import ModelFileError
from kvstow.models.architectures import make_config, unpermute
from kvstow.models.gguf_file import read_gguf
from kvstow.models.weights import check_dtype, check_kinds, write_weights

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType
READ_AS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def converted(path, dtype="float32", progress=None):
    """Every tensor of the file that `write_weights` makes of the GGUF at `path`."""
    file = read_gguf(path)
    out = path.with_suffix(".safetensors")
    write_weights(file, make_config(file), dtype, out, progress)
    data = out.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert header.pop("__metadata__") == {"format": "mlx"}
    assert max(about["data_offsets"][1] for about in header.values()) == len(body)
    return {
        name: np.frombuffer(body[slice(*about["data_offsets"])], READ_AS[about["dtype"]]).reshape(
            about["shape"]
        )
        for name, about in header.items()
    }


def test_llamas_queries_and_keys_are_unpermuted_and_the_rest_is_as_stored(tiny_gguf):
    rows = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    tensors = {"blk.1.attn_q.weight": rows, "blk.1.attn_v.weight": rows[:128]}
    weights = converted(tiny_gguf(tensors=tensors))
    np.testing.assert_array_equal(
        weights["model.layers.1.self_attn.q_proj.weight"], unpermute(rows, 4)
    )
    np.testing.assert_array_equal(weights["model.layers.1.self_attn.v_proj.weight"], rows[:128])


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_1, KINDS.F16, KINDS.BF16])
def test_packed_rows_decode_to_the_rows_that_gguf_decodes(tiny_gguf, kind):
    rows = np.random.default_rng(2).standard_normal((256, 256)).astype(np.float32)
    path = tiny_gguf(tensors={"blk.0.attn_q.weight": rows}, quantise=kind)
    decoded = gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)
    np.testing.assert_array_equal(
        converted(path)["model.layers.0.self_attn.q_proj.weight"], unpermute(decoded, 4)
    )


def test_only_llama_is_unpermuted(tiny_gguf):
    rows = np.random.default_rng(3).standard_normal((256, 256)).astype(np.float32)
    path = tiny_gguf("qwen2", tensors={"blk.0.attn_q.weight": rows})
    np.testing.assert_array_equal(converted(path)["model.layers.0.self_attn.q_proj.weight"], rows)


def test_gemmas_norms_lose_the_one_that_llama_cpp_adds(tiny_gguf):
    norm = np.linspace(0.5, 2, 256, dtype=np.float32)
    path = tiny_gguf("gemma3", tensors={"output_norm.weight": norm})
    np.testing.assert_array_equal(converted(path)["model.norm.weight"], norm - 1)


def test_a_tensor_longer_than_one_block_is_written_whole(tiny_gguf, monkeypatch):
    rows = np.random.default_rng(4).standard_normal((260, 256)).astype(np.float32)
    path = tiny_gguf(tensors={"token_embd.weight": rows})
    monkeypatch.setattr("kvstow.models.weights.BLOCK_ELEMENTS", 1000)
    np.testing.assert_array_equal(converted(path)["model.embed_tokens.weight"], rows)


@pytest.mark.mlx
def test_bfloat16_is_rounded_as_mlx_rounds_it(tiny_gguf):
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, (260, 256), dtype=np.uint64).astype(np.uint32)
    bits[0, :4] = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x80000001]  # ties, and the smallest
    rows = bits.view(np.float32)
    rows[~np.isfinite(rows) | (np.abs(rows) > 3e38)] = 1.0
    path = tiny_gguf(tensors={"token_embd.weight": rows})
    expected = np.array(mx.array(rows).astype(mx.bfloat16).view(mx.uint16))
    np.testing.assert_array_equal(
        converted(path, "bfloat16")["model.embed_tokens.weight"], expected
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tiny_gguf, bad):
    norm = np.full(256, bad, np.float32)
    with pytest.raises(ModelFileError, match=r"'output_norm\.weight' holds weights that are not"):
        converted(tiny_gguf(tensors={"output_norm.weight": norm}))


def test_weights_too_large_for_float16_are_refused_and_fit_bfloat16(tiny_gguf):
    path = tiny_gguf(tensors={"output_norm.weight": np.full(256, 1e5, np.float32)})
    with pytest.raises(ModelFileError, match="too large for float16; use bfloat16"):
        converted(path, "float16")
    assert (converted(path, "bfloat16")["model.norm.weight"] == 0x47C3).all()


def test_progress_ends_at_the_total(tiny_gguf):
    calls = []
    converted(tiny_gguf(), progress=lambda *call: calls.append(call))
    done, total, label = calls[-1]
    assert (done, label) == (total, "Converting llama-0.gguf")
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_a_quantisation_that_gguf_cannot_decode_is_refused_before_the_work(tiny_gguf, monkeypatch):
    def dequantize(*_):
        raise NotImplementedError

    file = read_gguf(tiny_gguf())
    check_kinds(file)
    monkeypatch.setattr("gguf.quants.dequantize", dequantize)
    with pytest.raises(ModelFileError, match="weights of type F32, which cannot be converted"):
        check_kinds(file)


def test_an_unknown_dtype_is_refused_with_the_three_allowed():
    with pytest.raises(ModelFileError, match="float32, float16, bfloat16; got 'int8'"):
        check_dtype("int8")

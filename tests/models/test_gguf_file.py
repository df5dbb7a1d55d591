import contextlib
import json
import logging
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow import ModelFileError
from kvstow.models.architectures import make_config
from kvstow.models.gguf_file import GgufFile, read_gguf
from kvstow.models.tokenizer import save_tokenizer

gguf = pytest.importorskip("gguf")


def test_the_header_is_read_as_llama_cpps_own_reader_reads_it(tiny_gguf):
    path = tiny_gguf(quantise=gguf.GGMLQuantizationType.Q8_0)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items()}
    assert ours.metadata == {k: v for k, v in expected.items() if not k.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.kind, mine.start) == (tensor.tensor_type, tensor.data_offset)
        assert mine.n_bytes == tensor.n_bytes


@pytest.mark.parametrize("kept", [0, 3, 23, 24, 100, 0.01, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused_wherever_it_ends(tiny_gguf, kept):
    path = tiny_gguf()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(ModelFileError, match="is truncated"):
        read_gguf(path)


def test_one_missing_byte_of_the_last_tensor_is_refused(tiny_gguf):
    path = tiny_gguf()
    end = max(tensor.start + tensor.n_bytes for tensor in read_gguf(path).tensors.values())
    path.write_bytes(path.read_bytes()[: end - 1])
    with pytest.raises(ModelFileError, match=rf"ends at byte {end:,}, the file has {end - 1:,}"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: b"GGML"}, "not a GGUF file"),
        ({4: struct.pack("<I", 1)}, "version 0x1; expected one of"),
        ({4: struct.pack(">I", 3)}, "version 0x3000000; expected .* little-endian"),
        ({8: struct.pack("<Q", 1 << 60)}, "truncated|damaged"),
        ({16: struct.pack("<Q", 1 << 60)}, "truncated|damaged"),
    ],
)
def test_a_wrong_header_is_refused(tiny_gguf, change, message):
    path = tiny_gguf()
    data = bytearray(path.read_bytes())
    for position, new in change.items():
        data[position : position + len(new)] = new
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        read_gguf(path)


def test_one_shard_of_several_is_refused_with_the_tool_that_joins_them(tiny_gguf):
    path = tiny_gguf(metadata=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ModelFileError, match=r"one of 3 shards; .*llama-gguf-split --merge"):
        read_gguf(path)


def test_a_tensor_of_an_unknown_type_is_refused(tiny_gguf):
    path = tiny_gguf()
    data = path.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # past the number of axes and the one axis
    path.write_bytes(data[:at] + struct.pack("<I", 999) + data[at + 4 :])
    with pytest.raises(ModelFileError, match=r"'output_norm.weight' is of type 999.*-U gguf"):
        read_gguf(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_to_the_header_is_either_harmless_or_refused(tiny_gguf, data):
    path = tiny_gguf()
    whole = bytearray(path.read_bytes())
    header = min(tensor.start for tensor in read_gguf(path).tensors.values())
    position = data.draw(st.integers(0, header - 8))
    whole[position : position + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path.write_bytes(whole)
    with contextlib.suppress(ModelFileError):
        json.dumps(make_config(read_gguf(path)))


def test_an_array_of_numbers_is_read_as_a_list(tiny_gguf):
    path = tiny_gguf(metadata=lambda w: w.add_array("some.numbers", np.arange(3).tolist()))
    assert read_gguf(path).metadata["some.numbers"] == [0, 1, 2]


OF_SOME_TYPE = {
    gguf.GGUFValueType.STRING: st.sampled_from(["", "llama", "3"]),
    gguf.GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 300),
    gguf.GGUFValueType.FLOAT32: st.floats(width=32),
    gguf.GGUFValueType.BOOL: st.booleans(),
}
ANY_VALUE = st.sampled_from(sorted(OF_SOME_TYPE)).flatmap(
    lambda kind: st.tuples(
        st.just(kind), OF_SOME_TYPE[kind] | st.lists(OF_SOME_TYPE[kind], min_size=1, max_size=3)
    )
)
OPTIONAL_KEYS = (
    *("general.alignment", "split.count", "llama.rope.dimension_count"),
    *("llama.rope.scaling.type", "llama.rope.scaling.factor", "tokenizer.ggml.add_bos_token"),
    *("tokenizer.ggml.eot_token_id", "tokenizer.ggml.scores", "tokenizer.ggml.padding_token_id"),
)


@pytest.fixture
def all_keys(tiny_gguf):
    """Of the metadata that is there, and that there could be."""
    return sorted([*read_gguf(tiny_gguf()).metadata, *OPTIONAL_KEYS])


@pytest.mark.mlx
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_metadata_of_a_wrong_type_is_either_harmless_or_refused(tiny_gguf, all_keys, data):
    pytest.importorskip("transformers")
    logging.getLogger("gguf.gguf_writer").setLevel(logging.ERROR)  # it warns of a replaced key
    key = data.draw(st.sampled_from(all_keys))
    kind, value = data.draw(ANY_VALUE)

    def replace(writer):
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, value, kind)

    path = tiny_gguf(metadata=replace)
    with contextlib.suppress(ModelFileError):
        file = read_gguf(path)
        json.dumps(make_config(file), allow_nan=False)
        save_tokenizer(file, "llama", path.parent)


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda file: file.integer("key"), "3", "'key' must be an integer, got '3'"),
        (lambda file: file.integer("key"), True, "'key' must be an integer, got True"),
        (lambda file: file.integer("key"), 0, "'key' must be an integer from 1 on, got 0"),
        (lambda file: file.integer("key"), [3], r"'key' must be an integer, got \[3\]"),
        (lambda file: file.positive("key"), "1", "'key' must be a number, got '1'"),
        (lambda file: file.positive("key"), float("nan"), "must be a positive number, got nan"),
        (lambda file: file.text("key"), ["llama"], r"'key' must be text, got \['llama'\]"),
        (lambda file: file.text("key"), None, "lacks the metadata 'key'"),
        (lambda file: file.array("key", str), "abc", "must be an array, each item text, got 'abc'"),
        (lambda file: file.array("key", str), [1] * 99, r"each item text, got \[1, 1, .*\.\.\.\]"),
    ],
)
def test_metadata_is_refused_with_what_it_must_be(tmp_path, read, value, message):
    metadata = {} if value is None else {"key": value}
    with pytest.raises(ModelFileError, match=message):
        read(GgufFile(tmp_path, metadata, {}))


def test_a_file_that_was_joined_from_shards_is_read(tiny_gguf):
    path = tiny_gguf(metadata=lambda writer: writer.add_uint16("split.count", 0))
    assert read_gguf(path).tensors


@pytest.mark.parametrize(("key", "value"), [("general.alignment", "32"), ("split.count", "1")])
def test_text_where_the_header_needs_a_number_is_refused(tiny_gguf, key, value):
    path = tiny_gguf(metadata=lambda writer: writer.add_string(key, value))
    with pytest.raises(ModelFileError, match=f"metadata '{key}' must be an integer, got '{value}'"):
        read_gguf(path)


def test_a_list_of_architectures_is_refused(tiny_gguf):
    key = "general.architecture"
    path = tiny_gguf(metadata=lambda writer: writer.add_array(key, ["llama"]))
    with pytest.raises(ModelFileError, match=f"metadata '{key}' must be text"):
        make_config(read_gguf(path))


def test_a_number_of_layers_in_the_billions_is_refused_at_once(tiny_gguf):
    path = tiny_gguf(metadata=lambda writer: writer.add_block_count(2**32 - 1))
    with pytest.raises(ModelFileError, match="of its tensors, such as"):
        make_config(read_gguf(path))

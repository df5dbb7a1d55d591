import contextlib
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstow import ModelFileError
from kvstow.models.gguf_file import read_gguf

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
        assert isinstance(read_gguf(path).metadata, dict)


def test_an_array_of_numbers_is_read_as_a_list(tiny_gguf):
    path = tiny_gguf(metadata=lambda w: w.add_array("some.numbers", np.arange(3).tolist()))
    assert read_gguf(path).metadata["some.numbers"] == [0, 1, 2]

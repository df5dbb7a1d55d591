"""What is written is what is read, whoever reads it."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS
from kvstow.snapshot import Snapshot
from tests.snapshot import made

SCHEMES = st.builds(
    "turbo:k{}v{}{}".format,
    st.sampled_from(KEY_BITS),
    st.sampled_from(VALUE_BITS),
    st.sampled_from(["", "+search", "+start9", "+stored", "+search+start3+stored"]),
)
LAYERS = st.tuples(
    st.sampled_from(["full", "sliding"]),
    st.sampled_from(["packed", "exact", "empty"]),
    SCHEMES,
    st.sampled_from(["F32", "F16", "BF16"]),
    st.sampled_from(HEAD_DIMS),
)


@settings(max_examples=40, deadline=None)
@given(layers=st.lists(LAYERS, max_size=4), n_tokens=st.integers(1, 300), seed=st.integers(0, 99))
def test_every_layer_comes_back_byte_for_byte(tmp_path_factory, layers, n_tokens, seed):
    path = tmp_path_factory.mktemp("round") / "x.safetensors"
    rng = np.random.default_rng(seed)
    records = [made.record(kind, stage, s, n_tokens, d) for kind, stage, s, d, _ in layers]
    pairs = [
        (record, made.arrays(record, rng, head_dim, dtype))
        for record, (*_, dtype, head_dim) in zip(records, layers, strict=True)
    ]
    written = made.snapshot(path, pairs, n_tokens)
    with Snapshot(path) as snapshot:
        assert list(snapshot.manifest.layers) == records
        assert list(snapshot.tensors) == list(written)
        for name, (dtype, array) in written.items():
            read = snapshot.read(name)
            assert (snapshot.tensors[name].dtype, read.dtype) == (dtype, array.dtype)
            assert read.tobytes() == array.tobytes()


def test_the_manifest_comes_back_as_it_was(tmp_path, rng):
    path = tmp_path / "x"
    made.mixed(path, rng, notes={"model": "smollm2", "": "\N{SNOWMAN}"})
    with Snapshot(path) as snapshot:
        manifest = snapshot.manifest
    assert manifest.from_dict(json.loads(json.dumps(manifest.as_dict()))) == manifest
    assert manifest.notes == {"model": "smollm2", "": "\N{SNOWMAN}"}
    assert (manifest.tables, manifest.created[:2]) == ("lloyd-max-v1", "20")


def test_the_tokens_come_back(tmp_path, rng):
    made.mixed(tmp_path / "x", rng, 7)
    with Snapshot(tmp_path / "x") as snapshot:
        assert snapshot.tokens() == [0, 1, 2, 3, 4, 5, 6]


def test_the_same_cache_gives_the_same_file(tmp_path):
    for name in "ab":
        made.mixed(tmp_path / name, np.random.default_rng(3), created="then")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_any_reader_of_safetensors_reads_the_same_bytes(tmp_path, rng):
    safetensors = pytest.importorskip("safetensors")
    written = made.mixed(tmp_path / "x", rng)
    del written["4.keys"], written["4.values"]  # numpy has no bfloat16
    with safetensors.safe_open(tmp_path / "x", "np") as file:
        assert file.metadata()["kvstow_snapshot"] == "0001"
        for name, (_, array) in written.items():
            assert file.get_tensor(name).tobytes() == array.tobytes()


@pytest.mark.mlx
def test_mlx_itself_reads_the_same_bytes(tmp_path, rng):
    mx = pytest.importorskip("mlx.core")
    records = pytest.importorskip("kvstow.integrations.mlx_lm.records")
    written = made.mixed(tmp_path / "x.safetensors", rng)
    read = mx.load(str(tmp_path / "x.safetensors"))
    assert read.keys() == written.keys()
    for name, (dtype, array) in written.items():
        assert records.DTYPES[read[name].dtype] == dtype
        assert records.to_numpy(read[name]).tobytes() == array.tobytes()
        assert records.to_numpy(records.to_mlx(array, dtype)).tobytes() == array.tobytes()

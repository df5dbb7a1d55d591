"""Both back-ends reproduce recorded vectors bit for bit.

`tests/golden` holds a few vectors of every kind, recorded from the reference. The
vectors recorded from vllm-metal itself are larger and live beside the repository, in
``shared/codec/goldens`` or where KVSTOW_GOLDENS says; without them one test skips for all.
"""

import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS

ROOT = Path(__file__).parents[2]
OURS = ROOT / "tests" / "golden"
ORACLE = Path(os.environ.get("KVSTOW_GOLDENS", ROOT.parent / "shared" / "codec" / "goldens"))
ORACLE_FILES = sorted(path.name for path in ORACLE.glob("codec_*.npz"))
ORACLE_KEY_NAMES = {8: "q8_0", 5: "q5_0", 4: "q4_0", 2: "int2"}

ARRAYS = {
    "reference": lambda: np.asarray,
    "mlx": lambda: pytest.importorskip("mlx.core").array,
}


def needs_oracle(test):
    """The test, or nothing where there are no goldens: one test is skipped for all of them."""
    return test if ORACLE.is_dir() else None


@pytest.fixture(params=["reference", pytest.param("mlx", marks=pytest.mark.mlx)])
def backend(request):
    array = ARRAYS[request.param]()
    return SimpleNamespace(codec=import_module(f"kvstow.codec.{request.param}"), array=array)


def assert_same(got, want):
    """Equal dtype, shape and bits, except that all NaN are equal and so are both zeros."""
    got = np.array(got)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize("guard", [False, True], ids=["parity", "guarded"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_recorded_vectors_are_encoded_to_the_recorded_planes(backend, head_dim, guard):
    prefix = "guarded" if guard else "parity"
    with np.load(OURS / f"codec_d{head_dim}.npz") as golden:
        vectors = backend.array(golden["in"])
        for bits in KEY_BITS:
            keys = backend.codec.encode_keys(vectors, bits=bits, guard=guard)
            for plane, got in keys._asdict().items():
                assert_same(got, golden[f"{prefix}.k{bits}.{plane}"])
        for bits in VALUE_BITS:
            values = backend.codec.encode_values(vectors, bits=bits, guard=guard)
            for plane, got in values._asdict().items():
                assert_same(got, golden[f"{prefix}.v{bits}.{plane}"])


@pytest.mark.parametrize("prefix", ["parity", "guarded"])
def test_recorded_planes_are_decoded_to_the_recorded_vectors(backend, prefix):
    with np.load(OURS / "codec_d64.npz") as golden:
        for bits in KEY_BITS:
            name = f"{prefix}.k{bits}"
            planes = [backend.array(golden[f"{name}.{plane}"]) for plane in PackedKeys._fields]
            got = backend.codec.decode_keys(PackedKeys(*planes), bits=bits)
            assert_same(got, golden[f"{name}.decoded"])
        for bits in VALUE_BITS:
            name = f"{prefix}.v{bits}"
            planes = [backend.array(golden[f"{name}.{plane}"]) for plane in PackedValues._fields]
            got = backend.codec.decode_values(PackedValues(*planes), bits=bits, head_dim=64)
            assert_same(got, golden[f"{name}.decoded"])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_recorded_vectors_are_rotated_and_unrotated_as_recorded(backend, head_dim):
    with np.load(OURS / f"codec_d{head_dim}.npz") as golden:
        vectors = backend.array(golden["in"])
        assert_same(backend.codec.rotate(vectors), golden["rotated"])
        assert_same(backend.codec.unrotate(vectors), golden["unrotated"])


def check_against_oracle(backend, golden, prefix, keys, values):
    """Every key and value width of one file of the oracle."""
    codec = backend.codec
    for bits, name in ORACLE_KEY_NAMES.items():
        packed = codec.encode_keys(backend.array(keys), bits=bits)
        codes = packed.codes if bits == 8 else codec.unpack_bits(packed.codes, bits=bits)
        assert_same(codes, golden[f"{prefix}k.{name}.idx"])
        assert_same(packed.scales, golden[f"{prefix}k.{name}.scale"])
        assert_same(packed.zeros, golden[f"{prefix}k.{name}.zero"])
        check_decoded(golden, f"{prefix}k.{name}", packed, codec.decode_keys(packed, bits=bits))
    for bits in VALUE_BITS:
        packed = codec.encode_values(backend.array(values), bits=bits)
        assert_same(codec.unpack_bits(packed.codes, bits=bits), golden[f"{prefix}v.{bits}.idx"])
        assert_same(packed.scales, golden[f"{prefix}v.scale"])
        decoded = codec.decode_values(packed, bits=bits, head_dim=values.shape[-1])
        check_decoded(golden, f"{prefix}v.{bits}", packed, decoded)


def check_decoded(golden, name, packed, decoded):
    if f"{name}.packed" in golden:
        assert_same(packed.codes, golden[f"{name}.packed"])
    if f"{name}.deq" in golden:
        assert_same(decoded, golden[f"{name}.deq"])


@pytest.mark.skipif(
    not ORACLE.is_dir(), reason="set KVSTOW_GOLDENS to a folder of the oracle's goldens"
)
def test_the_oracles_goldens_are_there():
    assert ORACLE_FILES


@needs_oracle
@pytest.mark.parametrize("file", ORACLE_FILES)
def test_the_oracle_encodes_and_decodes_the_same_bits(backend, file):
    with np.load(ORACLE / file) as golden:
        check_against_oracle(backend, golden, "f32.", golden["in_k"], golden["in_v"])


@needs_oracle
def test_the_oracle_treats_degenerate_vectors_alike(backend):
    with np.load(ORACLE / "special.npz") as golden:
        check_against_oracle(backend, golden, "", golden["in"], golden["in"])


@needs_oracle
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_oracle_rotates_to_the_same_bits(backend, head_dim):
    with np.load(ORACLE / "fwht.npz") as golden:
        vectors = backend.array(golden[f"f32_{head_dim}_in"])
        assert_same(backend.codec.rotate(vectors), golden[f"f32_{head_dim}_fwd"])
        assert_same(backend.codec.unrotate(vectors), golden[f"f32_{head_dim}_inv"])


@needs_oracle
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_the_oracle_packs_and_decodes_arbitrary_bytes_alike(backend, bits):
    codec, array = backend.codec, backend.array
    with np.load(ORACLE / "pack_decode.npz") as golden:
        assert_same(
            codec.pack_bits(array(golden[f"vals_{bits}"]), bits=bits), golden[f"packed_{bits}"]
        )
        octets, scales, zeros = (array(golden[f"{name}_{bits}"]) for name in ("bytes", "s", "z"))
        assert_same(codec.unpack_bits(octets, bits=bits), golden[f"unpacked_{bits}"])
        values = codec.decode_values(PackedValues(octets, scales), bits=bits, head_dim=64)
        assert_same(values, golden[f"vdeq_{bits}"])
        if bits in KEY_BITS:
            keys = codec.decode_keys(PackedKeys(octets, scales, zeros), bits=bits)
            assert_same(keys, golden[f"kdeq_{bits}"])


@needs_oracle
def test_the_oracle_decodes_arbitrary_whole_bytes_alike(backend):
    codec, array = backend.codec, backend.array
    with np.load(ORACLE / "pack_decode.npz") as golden:
        keys = PackedKeys(*(array(golden[f"{name}_int8"]) for name in ("bytes", "s", "z")))
        values = PackedValues(*(array(golden[f"{name}_uint8"]) for name in ("bytes", "s")))
        assert_same(codec.decode_keys(keys, bits=8), golden["kdeq_int8"])
        assert_same(codec.decode_values(values, bits=8, head_dim=64), golden["vdeq_uint8"])

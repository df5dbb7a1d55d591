"""Each cause has its own error, before anything is made of the file."""

import json
import os
import re

import numpy as np
import pytest

from kvstow import errors
from kvstow.scheme import Scheme
from kvstow.snapshot import Fingerprint, Record, Snapshot, check_scheme
from tests.snapshot import made


@pytest.fixture
def path(tmp_path, rng):
    made.mixed(tmp_path / "x.safetensors", rng)
    return tmp_path / "x.safetensors"


def refusal(path):
    """The error that the file meets, of whatever kind; None if there is none."""
    try:
        with Snapshot(path) as snapshot:
            snapshot.verify()
    except errors.SnapshotError as error:
        return type(error)
    return None


def test_an_error_names_the_file(path):
    path.write_bytes(b"The quick brown fox")
    with pytest.raises(errors.ForeignSnapshot, match=r"x\.safetensors: this is not a snapshot"):
        Snapshot(path)


def rewritten(path, change):
    """The file with other metadata, all checksums right."""
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little") + 8
    content = json.loads(raw[8:n_header])
    metadata = content["__metadata__"]
    manifest = json.loads(metadata["manifest"])
    change(manifest, content)
    metadata["manifest"] = json.dumps(manifest)
    text = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(made.signed(len(text).to_bytes(8, "little") + text + raw[n_header:]))


def test_a_file_that_is_missing_is_an_error_with_its_name(tmp_path):
    with pytest.raises(errors.SnapshotError, match=r"cannot read .*none: No such file"):
        Snapshot(tmp_path / "none")


@pytest.mark.parametrize("n_bytes", [0, 5, 8, 40, 59, 300])
def test_a_header_that_ends_too_early_is_truncated(path, n_bytes):
    path.write_bytes(path.read_bytes()[:n_bytes])
    assert refusal(path) is errors.TruncatedSnapshot


def test_a_file_without_its_last_byte_is_truncated(path):
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(path) is errors.TruncatedSnapshot


def test_a_file_that_shrinks_while_it_is_read_is_truncated(path):
    with Snapshot(path) as snapshot:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(errors.TruncatedSnapshot):
            snapshot.verify()


def test_a_file_with_something_behind_its_end_is_damaged(path):
    path.write_bytes(path.read_bytes() + b"\0")
    assert refusal(path) is errors.DamagedSnapshot


def test_other_files_are_foreign(path):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"x": np.zeros(99)}, path)
    assert refusal(path) is errors.ForeignSnapshot
    for foreign in (b"GGUF" + bytes(200), b"PK\x03\x04" + bytes(200), b"{}", b"x" * 9):
        path.write_bytes(bytes(8) + foreign if len(foreign) < 8 else foreign)
        assert refusal(path) is errors.ForeignSnapshot


@pytest.mark.parametrize("claimed", [1 << 24, 1 << 40, (1 << 64) - 1])
def test_a_header_of_an_absurd_size_is_refused_before_it_is_read(path, claimed):
    path.write_bytes(claimed.to_bytes(8, "little") + path.read_bytes()[8:])
    assert refusal(path) is errors.OversizedHeader


@pytest.mark.parametrize("claimed", [0, 1, 40])
def test_a_header_that_claims_to_be_shorter_than_any_is_damaged(path, claimed):
    path.write_bytes(claimed.to_bytes(8, "little") + path.read_bytes()[8:])
    assert refusal(path) is errors.DamagedSnapshot


def test_a_newer_format_is_refused_by_its_version(path):
    raw = path.read_bytes()
    newer = raw.replace(b'"kvstow_snapshot":"0001"', b'"kvstow_snapshot":"0002"', 1)
    path.write_bytes(made.signed(newer))
    assert refusal(path) is errors.NewerSnapshot
    with pytest.raises(errors.NewerSnapshot, match="version 0002; this program reads version 0001"):
        Snapshot(path)
    path.write_bytes(newer)  # a flipped bit, not a version
    assert refusal(path) is errors.DamagedSnapshot


def test_other_tables_are_refused_by_their_name(path):
    rewritten(path, lambda manifest, _: manifest.update(tables="lloyd-max-v2"))
    assert refusal(path) is errors.OtherTables


def test_nothing_is_wrong_with_a_file_that_is_only_written_anew(path):
    rewritten(path, lambda *_: None)
    assert refusal(path) is None


def _list(*members):
    return Record("list").as_dict() | {"members": list(members)}


WRONG = {
    "a tensor beyond the file": lambda _, x: x["0.key_codes"]["data_offsets"].__setitem__(
        1, 1 << 40
    ),
    "overlapping tensors": lambda _, x: x["0.key_scales"].update(data_offsets=[0, 1]),
    "a negative axis": lambda _, x: x["0.key_codes"]["shape"].__setitem__(2, -40),
    "an axis that no array has": lambda _, x: x["tokens"].update(shape=[0, 1 << 60]),
    "a shape of truth": lambda _, x: x["tokens"].update(shape=[True]),
    "an unknown dtype": lambda _, x: x["tokens"].update(dtype="F8"),
    "a list for a dtype": lambda _, x: x["tokens"].update(dtype=["F32"]),
    "a key too many": lambda _, x: x["tokens"].update(more=1),
    "a tensor of no layer": lambda _, x: x.update({"9.keys": x.pop("7.1.value_scales")}),
    "fewer tokens": lambda m, _: m.update(n_tokens=39),
    "another offset": lambda m, _: m["layers"][0]["numbers"].update(offset=39),
    "an offset that is no number": lambda m, _: m["layers"][0]["numbers"].update(offset="40"),
    "an offset without end": lambda m, _: m["layers"][0]["numbers"].update(offset=10**30),
    "an index beyond the window": lambda m, _: m["layers"][3]["numbers"].update(index=33),
    "a window that keeps all": lambda m, _: m["layers"][3]["numbers"].update(keep=32),
    "no index": lambda m, _: m["layers"][3]["numbers"].pop("index"),
    "another scheme": lambda m, _: m["layers"][0].update(scheme="turbo:k8v4"),
    "no scheme": lambda m, _: m["layers"][0].update(scheme="__import__('os')"),
    "affine under turbo": lambda m, _: m["layers"][0].update(stage="affine"),
    "exact under another name": lambda m, _: m["layers"][0].update(stage="exact"),
    "an unknown stage": lambda m, _: m["layers"][0].update(stage="x"),
    "an unknown kind": lambda m, _: m["layers"][0].update(kind="os.system"),
    "another dtype": lambda m, _: m["layers"][0].update(dtype="I8"),
    "arrays without end": lambda m, _: m["layers"][6]["numbers"].update(size=1 << 40),
    "members of a leaf": lambda m, _: m["layers"][0].update(members=[m["layers"][1]]),
    "lists in lists": lambda m, _: m["layers"][7].update(members=[_list(_list(_list()))]),
    "another number of layers": lambda m, _: m["layers"].pop(),
    "another shape of the model": lambda m, _: m["shapes"].__setitem__(0, "full 3 x 64"),
    "notes that are none": lambda m, _: m["notes"].update(x=1),
    "no notes": lambda m, _: m.pop("notes"),
    "an unknown policy": lambda m, _: m.update(policy="policy(x; y)"),
    "a number for a name": lambda m, _: m.update(tokenizer=3),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_contradiction_is_damage_even_where_the_checksums_fit(path, change):
    rewritten(path, change)
    assert refusal(path) is errors.DamagedSnapshot


def test_nesting_without_end_is_damage(path):
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little") + 8
    start = raw[8:n_header].index(b'"manifest":"') + 20
    deep = raw[8:start] + b"[" * 200_000
    path.write_bytes(made.signed(len(deep).to_bytes(8, "little") + deep))
    assert refusal(path) is errors.DamagedSnapshot


def test_a_name_given_twice_is_damage(path):
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little") + 8
    text = re.sub(rb'"tokens":\{', b'"tokens":{},"tokens":{', raw[8:n_header])
    path.write_bytes(made.signed(len(text).to_bytes(8, "little") + text + raw[n_header:]))
    assert refusal(path) is errors.DamagedSnapshot


LLAMA = Fingerprint("llama", ("full 2 x 64", "full 2 x 64"), "w" * 32)


@pytest.mark.parametrize(
    "other",
    [
        Fingerprint("qwen2", LLAMA.layers, LLAMA.weights),
        Fingerprint("llama", LLAMA.layers[:1], LLAMA.weights),
        Fingerprint("llama", ("full 2 x 64", "full 2 x 128"), LLAMA.weights),
        Fingerprint("llama", LLAMA.layers, "v" * 32),
    ],
)
def test_another_model_is_refused(other):
    with pytest.raises(errors.OtherModel):
        LLAMA.check(other)


def test_weights_that_are_not_loaded_yet_are_not_another_model():
    LLAMA.check(LLAMA)
    LLAMA.check(Fingerprint("llama", LLAMA.layers))


def test_another_tokenizer_is_refused(path):
    with Snapshot(path) as snapshot:
        snapshot.manifest.check_tokenizer("t" * 32)
        with pytest.raises(errors.OtherTokenizer):
            snapshot.manifest.check_tokenizer("u" * 32)


@pytest.mark.parametrize("wanted", ["turbo:k8v4", "turbo:k8v3+stored", "turbo:k8v3+start9", "off"])
def test_another_scheme_is_refused(wanted):
    saved = Record("full", {"offset": 0}, Scheme.parse("turbo:k8v3"))
    with pytest.raises(errors.OtherScheme, match=re.escape(f"turbo:k8v3, and {wanted} is")):
        check_scheme(0, saved, Record("full", {"offset": 0}, Scheme.parse(wanted)))


def test_search_is_the_encoders_alone_and_no_other_scheme():
    saved, wanted = (
        Record("full", {"offset": 0}, Scheme.parse(s)) for s in ("turbo:k8v3", "turbo:k8v3+search")
    )
    check_scheme(0, saved, wanted)
    check_scheme(0, wanted, saved)

"""Thousands of damaged files: each is refused by name, none crashes, none is believed."""

import json
import tracemalloc

import numpy as np
import pytest

from kvstow.errors import SnapshotError
from kvstow.snapshot import Snapshot
from tests.snapshot import made

N_FLIPS, N_CUTS, N_SIGNED = 3000, 1000, 2000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a small snapshot with a layer of each kind."""
    path = tmp_path_factory.mktemp("fuzz") / "x"
    made.mixed(path, np.random.default_rng(1), n_tokens=3)
    return path.read_bytes()


@pytest.fixture
def read(tmp_path):
    """All tensors of a file with these bytes; None where it is refused."""
    path = tmp_path / "x"

    def run(raw):
        path.write_bytes(raw)
        try:
            with Snapshot(path) as snapshot:
                snapshot.manifest.as_dict()
                return {name: snapshot.read(name).tobytes() for name in snapshot.tensors}
        except SnapshotError:
            return None

    return run


def test_one_flipped_bit_anywhere_is_refused(whole, read, rng):
    assert read(whole) is not None
    n_header = int.from_bytes(whole[:8], "little") + 8
    for i in range(N_FLIPS):
        end = n_header if i % 2 else len(whole)  # half of them in the header
        raw = bytearray(whole)
        raw[int(rng.integers(end))] ^= 1 << int(rng.integers(8))
        assert read(bytes(raw)) is None


def test_a_file_cut_anywhere_is_refused(whole, read, rng):
    for end in rng.integers(0, len(whole), N_CUTS):
        assert read(whole[:end]) is None


def test_damage_of_any_size_is_refused(whole, read, rng):
    for _ in range(500):
        start, n = int(rng.integers(len(whole))), int(rng.integers(1, 2000))
        noise = rng.bytes(n)
        changed = whole[:start] + noise + whole[start + n :]
        assert changed == whole or read(changed) is None
        assert read(whole[:start] + whole[start + n :]) is None
        assert read(whole[:start] + noise + whole[start:]) is None


VALUES = (-1, 0, 1, 3, 2**31, 2**63, 10**40, 1.5, True, None, "", "x", "off", [], {}, [[]], "F32")


def mutated(content, rng):
    """A JSON value with something changed somewhere within."""
    if isinstance(content, dict | list) and content and rng.random() < 0.9:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = keys[int(rng.integers(len(keys)))]
        twin = content.copy()
        if rng.random() < 0.1:
            del twin[key]
        else:
            twin[key] = mutated(content[key], rng)
        return twin
    return VALUES[int(rng.integers(len(VALUES)))]


def test_a_header_that_lies_with_a_right_checksum_never_crashes_or_takes_memory(whole, read, rng):
    """Such a file is made on purpose. What is still read has the bytes of the file."""
    n_header = int.from_bytes(whole[:8], "little") + 8
    content = json.loads(whole[8:n_header])
    metadata = content.pop("__metadata__")
    manifest = json.loads(metadata["manifest"])
    tracemalloc.start()
    for i in range(N_SIGNED):
        said = dict(metadata)
        tensors = content
        if i % 2:
            said["manifest"] = json.dumps(mutated(manifest, rng))
        else:
            tensors = mutated(content, rng)
        whole_header = {"__metadata__": said, **(tensors if isinstance(tensors, dict) else {})}
        text = json.dumps(whole_header, separators=(",", ":")).encode()
        read(made.signed(len(text).to_bytes(8, "little") + text + whole[n_header:]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * len(whole)

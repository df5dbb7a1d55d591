"""A crash leaves the old file or none."""

import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from kvstow import Policy
from kvstow.errors import SnapshotError
from kvstow.snapshot import Fingerprint, Manifest, Snapshot, Source, write
from tests.snapshot import made

ROOT = Path(__file__).parents[2]
N_KILLS = 12
# Writes over one file again and again; every array of a file holds its number.
ENDLESS = """
import itertools, sys
from pathlib import Path
import numpy as np
from tests.snapshot import made
record = made.record("full", "exact", "off", 2000)
print("ready", flush=True)
for i in itertools.count(1):
    x = np.full((1, 2, 2000, 64), i, np.float32)
    made.snapshot(Path(sys.argv[1]), [(record, {"keys": ("F32", x), "values": ("F32", x)})], 2000)
"""
# Writes once, and dies where it is told.
DIES = """
import os, sys
from pathlib import Path
import numpy as np
from tests.snapshot import made
import kvstow.snapshot.write
module = sys.modules["kvstow.snapshot.write"]
place = sys.argv[2]
if place == "between tensors":
    real, seen = module._write_one, []
    module._write_one = lambda *a: os._exit(9) if len(seen) > 3 else (seen.append(1), real(*a))[1]
elif place == "before the sync":
    module.os.fsync = lambda *_: os._exit(9)
elif place == "before the rename":
    module.Path.replace = lambda *_: os._exit(9)
elif place == "after the rename":
    module._sync_directory = lambda *_: os._exit(9)
made.mixed(Path(sys.argv[1]), np.random.default_rng(2), n_tokens=9)
"""


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def first_value(path):
    with Snapshot(path) as snapshot:
        snapshot.verify()
        held = {float(x) for name in ("0.keys", "0.values") for x in np.unique(snapshot.read(name))}
    assert len(held) == 1  # of one write, and not of two
    return held.pop()


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_file(tmp_path, rng):
    path = tmp_path / "x"
    newest = 0.0
    for _ in range(N_KILLS):
        command = [sys.executable, "-c", ENDLESS, str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
        try:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(float(rng.uniform(0, 0.1)))
        finally:
            process.kill()
            process.communicate()
        if path.exists():
            newest = max(newest, first_value(path))
    assert newest >= 1


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "place", ["between tensors", "before the sync", "before the rename", "after the rename"]
)
def test_a_writer_that_dies_leaves_the_old_file_or_the_new_one(tmp_path, rng, place, old):
    path = tmp_path / "x"
    if old:
        made.mixed(path, rng, n_tokens=5)
    command = [sys.executable, "-c", DIES, str(path), place]
    assert subprocess.run(command, check=False, env=environment()).returncode == 9
    if place == "after the rename" or old:
        with Snapshot(path) as snapshot:
            snapshot.verify()
            assert snapshot.manifest.n_tokens == (9 if place == "after the rename" else 5)
    else:
        assert not path.exists()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, rng, monkeypatch):
    path = tmp_path / "x"
    made.mixed(path, rng, n_tokens=5)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SnapshotError, match=r"cannot write .*x: No space left on device"):
        made.mixed(path, rng)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]  # noqa: PTH208


def test_a_directory_that_cannot_be_written_is_an_error_with_its_name(tmp_path, rng):
    with pytest.raises(SnapshotError, match=r"cannot write .*none.x: No such file or directory"):
        made.mixed(tmp_path / "none" / "x", rng)


def test_a_file_is_its_owners_alone(tmp_path, rng):
    made.mixed(tmp_path / "x", rng)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_what_a_killed_writer_left_is_removed_after_a_day(tmp_path, rng):
    old, young, other = (tmp_path / name for name in (".x.old", ".x.young", ".y.old"))
    for file in (old, young, other):
        file.write_bytes(b"")
    for file in (old, other):
        os.utime(file, (1, 1))
    made.mixed(tmp_path / "x", rng)
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    n_bytes, n_layers = 1 << 20, 16
    record = made.record("full", "exact", "off", 4096)
    shape = (1, 2, 4096, 32)
    names = [f"{i}.{x}" for i in range(n_layers) for x in ("keys", "values")]
    sources = {name: Source("F32", shape, lambda: np.ones(shape, np.float32)) for name in names}
    tokens = Source("U32", (4096,), lambda: np.zeros(4096, np.uint32))
    manifest = Manifest(
        Fingerprint("made", ("full 2 x 32",) * n_layers),
        "t",
        Policy.of("off"),
        (record,) * n_layers,
        4096,
    )
    tracemalloc.start()
    write(tmp_path / "x", manifest, {"tokens": tokens, **sources})
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    with Snapshot(tmp_path / "x") as snapshot:
        snapshot.verify()
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_bytes <= min(written, read)
    assert max(written, read) < 2.5 * n_bytes  # of 32


def test_an_array_of_another_size_than_announced_is_refused(tmp_path, rng):
    record = made.record("full", "exact", "off", 3)
    x = rng.standard_normal((1, 2, 3, 64)).astype(np.float32)
    tokens = np.zeros(3, np.uint32)
    manifest = Manifest(Fingerprint("m", ("full 2 x 64",)), "t", Policy.of("off"), (record,), 3)
    sources = {
        "tokens": Source("U32", (3,), lambda: tokens),
        "0.keys": Source("F32", x.shape, lambda: x[:, :, :2]),
        "0.values": Source("F32", x.shape, lambda: x),
    }
    with pytest.raises(SnapshotError, match="announced otherwise"):
        write(tmp_path / "x", manifest, sources)
    assert list(tmp_path.iterdir()) == []

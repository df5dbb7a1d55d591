"""Nobody waits for the disk, and no failure of it stops anybody."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstow.errors import SnapshotError
from kvstow.snapshot import Source
from kvstow.snapshot.prefixes import (
    HEAD_TOKENS,
    Job,
    PrefixDirectory,
    PrefixStats,
    WriteBehind,
    files,
    writer,
)
from kvstow.snapshot.prefixes.names import Name
from tests.snapshot import made_prefixes as made

ROOT = Path(__file__).parents[2]
PLENTY = 1 << 30


class Disk:
    """A directory, its writer, and what they complained of."""

    def __init__(self, root, max_bytes=PLENTY):
        self.problems, self.stats = [], PrefixStats()
        self.directory = PrefixDirectory(root, self.problems.append)
        self.writer = WriteBehind(self.directory, max_bytes, self.stats, self.problems.append)

    def put(self, whole, model=made.MODEL, **sources):
        held = made.sources_of(whole, model) | sources
        self.writer.put(lambda: Job(whole, made.manifest_of(whole, model), held))

    def put_in_vain(self):
        """Put what would not be taken: so it need not be made."""
        self.writer.put(lambda: pytest.fail("it was made"))

    def lengths(self):
        found = (Name.parse(path.name).n_tokens for path in made.paths(self.directory))
        return sorted(n - HEAD_TOKENS for n in found)


def tokens(n, seed=0):
    """`n` tokens behind those that all of them begin with."""
    return made.tokens_of(*np.random.default_rng(seed).integers(0, 1000, n))


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "prefixes")
    yield disk
    disk.writer.close()


def test_what_is_put_is_read_again(disk):
    disk.put(tokens(50))
    disk.writer.flush()
    found = disk.directory.nearest(made.key(), tokens(50))
    arrays = made.read(disk.directory, found)
    for name, source in made.sources_of(tokens(50)).items():
        np.testing.assert_array_equal(arrays[name], source.read())
    assert (disk.stats.writes, disk.stats.written_bytes) == (1, found.entry.path.stat().st_size)


def test_putting_never_waits_and_what_is_too_much_is_dropped_and_counted(disk):
    gate, entered = threading.Event(), threading.Event()
    slow = tokens(50)

    def wait():
        entered.set()
        assert gate.wait(10)
        return slow

    disk.put(slow, tokens=Source("U32", slow.shape, wait))
    assert entered.wait(10)
    for seed in range(1, writer.MAX_WAITING + 4):
        disk.put(tokens(50, seed))
    assert disk.stats.dropped == 3
    disk.put_in_vain()
    assert (disk.stats.dropped, disk.stats.writes) == (4, 0)
    gate.set()
    disk.writer.flush()
    assert disk.stats.writes == 1 + writer.MAX_WAITING
    assert disk.problems == []


def test_closing_writes_what_waits_and_takes_no_more(disk):
    for seed in range(3):
        disk.put(tokens(50, seed))
    disk.writer.close()
    assert disk.lengths() == [50] * 3
    disk.put_in_vain()
    disk.writer.flush()
    assert disk.lengths() == [50] * 3


@pytest.mark.parametrize("model", [made.MODEL, made.RECURRENT], ids=["trimmed", "whole"])
def test_a_prefix_is_written_if_an_eighth_of_it_is_new(disk, model):
    whole = tokens(200)
    for n in (160, 160, 180, 184, 185):
        disk.put(whole[:n], model)
        disk.writer.flush()
    kept = [184] if model is made.MODEL else [160, 184]
    assert disk.lengths() == [n - HEAD_TOKENS for n in kept]
    assert (disk.stats.writes, disk.stats.skipped) == (2, 3)


def test_a_part_of_what_is_there_is_written_only_if_that_cannot_be_trimmed(disk):
    for model in (made.MODEL, made.RECURRENT):
        disk.put(tokens(100), model)
        disk.put(tokens(100)[:70], model)
    disk.writer.flush()
    assert (disk.lengths(), disk.stats.skipped) == ([38, 100, 100], 1)


def test_what_is_put_again_is_used_again(disk):
    for seed in (1, 2, 1):
        disk.put(tokens(50, seed))
    disk.writer.flush()
    newest = files.entries(disk.directory.root)[-1].path
    assert newest == disk.directory.nearest(made.key(), tokens(50, 1)).entry.path


def test_all_files_together_take_no_more_than_they_may(tmp_path):
    disk = Disk(tmp_path, max_bytes=12_000)
    for seed in range(9):
        disk.put(tokens(50, seed))
        disk.writer.flush()
        held = files.entries(tmp_path)
        assert sum(x.n_bytes for x in held) <= 12_000
    assert disk.stats.evictions == 9 - len(held) > 0
    assert disk.directory.nearest(made.key(), tokens(50, 8)).n_tokens == HEAD_TOKENS + 50
    disk.put(tokens(5000))
    disk.writer.flush()
    assert len(files.entries(tmp_path)) == len(held)  # nothing went for what has no room at all
    assert "5032 tokens take" in disk.problems[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("place", ["os.fsync", "tempfile.mkstemp"])
def test_a_disk_that_cannot_be_written_is_told_of_once_and_still_read(
    disk, monkeypatch, number, place
):
    disk.put(tokens(50, 1))
    disk.writer.flush()
    seen = []

    def fail(*_, **__):
        seen.append(1)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(place, fail)
    for seed in range(2, 6):
        disk.put(tokens(50, seed))
    disk.writer.flush()
    assert len(seen) == len(disk.problems) == 1
    assert f"{os.strerror(number)}: no more prefixes are written" in disk.problems[0]
    disk.put_in_vain()
    found = disk.directory.nearest(made.key(), tokens(50, 1))
    assert made.read(disk.directory, found) is not None
    assert disk.lengths() == [50]
    assert [x for x in found.entry.path.parent.iterdir() if x.name.startswith(".")] == []


def test_a_directory_that_cannot_be_made_is_told_of_once(tmp_path):
    (tmp_path / "file").write_text("x")
    disk = Disk(tmp_path / "file" / "prefixes")
    for seed in range(3):
        disk.put(tokens(50, seed))
    disk.writer.close()
    assert len(disk.problems) == 1
    assert "Not a directory: no more prefixes are written" in disk.problems[0]


def test_a_file_that_cannot_be_marked_as_used_is_still_read(disk, monkeypatch):
    disk.put(tokens(50))
    disk.writer.flush()

    def fail(*_, **__):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.os, "utime", fail)
    found = disk.directory.nearest(made.key(), tokens(50))
    assert made.read(disk.directory, found) is not None


def test_one_bad_prefix_does_not_stop_the_next(disk):
    wrong = Source("F32", (1, 1, 82, 2), lambda: np.zeros(3, np.float32))
    disk.put(tokens(50, 1), **{"0.keys": wrong})
    disk.put(tokens(50, 2))
    disk.writer.flush()
    assert (disk.lengths(), len(disk.problems)) == ([50], 1)


def test_a_folder_that_another_removes_meanwhile_stops_nothing(disk, monkeypatch):
    def removed(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkstemp", removed)
        disk.put(tokens(50, 1))
        disk.writer.flush()
    disk.put(tokens(50, 2))
    disk.writer.flush()
    assert (disk.lengths(), len(disk.problems)) == ([50], 1)


def test_a_mistake_in_the_thread_is_told_and_nobody_waits_for_ever(disk):
    def broken():
        raise ZeroDivisionError("a bug")

    whole = tokens(50)
    disk.put(whole, tokens=Source("U32", whole.shape, broken))
    disk.writer.flush()
    assert "a bug" in disk.problems[0]


# --- several processes

# Puts and reads prefixes of a few families, in a directory that has room for some of them.
BUSY = """
import random, sys
from pathlib import Path
import numpy as np
from tests.snapshot import made_prefixes as made, test_write_behind as own
from kvstow.snapshot.prefixes import files
seed, rounds = int(sys.argv[2]), int(sys.argv[3])
disk, random = own.Disk(Path(sys.argv[1]), max_bytes=30_000), random.Random(seed)
print("ready", flush=True)
hits = 0
for i in range(rounds):
    whole = own.tokens(120, random.randrange(4))
    disk.put(whole[: random.randrange(40, len(whole))])
    if i % 3 == 0:
        disk.writer.flush()
    if random.random() < 0.2:
        held = made.paths(disk.directory)
        held and files.remove(random.choice(held))
    found = disk.directory.nearest(made.key(), whole)
    arrays = made.read(disk.directory, found)
    if arrays is not None:
        hits += 1
        for name, source in made.sources_of(found.entry.tokens).items():
            np.testing.assert_array_equal(arrays[name], source.read())
        np.testing.assert_array_equal(found.entry.tokens[: found.n_tokens], whole[: found.n_tokens])
disk.writer.close()
assert hits and not disk.problems, (hits, disk.problems)
"""


def start(root, seed, rounds):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", BUSY, str(root), str(seed), str(rounds)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def test_several_processes_share_a_directory(tmp_path):
    running = [start(tmp_path, seed, 90) for seed in range(3)]
    for process in running:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said.decode()
    directory = PrefixDirectory(tmp_path)
    for path in made.paths(directory):
        directory.check(path)
    assert files.temporary(tmp_path) == []


def test_a_process_that_is_killed_leaves_nothing_that_is_served_wrongly(tmp_path, rng):
    for i in range(4):
        process = start(tmp_path, i, 10**6)
        try:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(float(rng.uniform(0.02, 0.1)))
        finally:
            process.kill()
            process.communicate()
    problems = []
    directory = PrefixDirectory(tmp_path, problems.append)
    for seed in range(4):
        whole = tokens(120, seed)
        found = directory.nearest(made.key(), whole)
        if found is not None:
            assert made.read(directory, found)["tokens"].tolist() == found.entry.tokens.tolist()
    assert problems == []
    for path in made.paths(directory):
        directory.check(path)
    for left in files.temporary(tmp_path):
        files.os.utime(left.path, (1, 1))
    files.evict(tmp_path, PLENTY)
    assert files.temporary(tmp_path) == []


def test_what_cannot_be_believed_is_refused_by_a_check(disk):
    disk.put(tokens(50))
    disk.writer.flush()
    (path,) = made.paths(disk.directory)
    disk.directory.check(path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(SnapshotError, match="checksum"):
        disk.directory.check(path)
    assert path.exists()

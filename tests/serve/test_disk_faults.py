"""What becomes of the server when its files cannot be written, go away, or are of another time."""

import errno
import os
import shutil
import subprocess
import time
import warnings

import pytest

from kvstow.errors import KvstowWarning
from kvstow.serve.options import PrefixFiles

pytestmark = pytest.mark.mlx
LENGTH = 300  # tokens of a prompt
A_YEAR_S = 365 * 86_400


def prompt(i):
    """No two begin alike."""
    return [i] * LENGTH


def cached(it, i):
    """Ask about a prompt; how many of its tokens were found."""
    answer = it.client.completions.create(model="tiny", prompt=prompt(i), max_tokens=2)
    return answer.usage.prompt_tokens_details.cached_tokens


def forget(it):
    """Leave files alone as the place where prompts are."""
    it.settled()
    it.server._disk.flush()
    it.engine.prompt_cache.trim_to(n_sequences=0)


@pytest.fixture
def disk(serve, tiny, tmp_path):
    """Serve over a directory; what was warned of is in ``said``."""

    def serving(directory=tmp_path / "prefixes"):
        return serve(tiny, context=1000, prefix_files=PrefixFiles(directory, 10**9))

    serving.directory = tmp_path / "prefixes"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        serving.said = lambda: [str(w.message) for w in said if w.category is KvstowWarning]
        yield serving


def files(directory):
    return sorted(directory.rglob("*.safetensors"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_said_once_and_everything_goes_on(
    disk, monkeypatch, number
):
    with disk() as it:
        assert cached(it, 1) == 0
        forget(it)

        def fails(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("os.fsync", fails)
        assert [cached(it, i) for i in (2, 3, 4)] == [0, 0, 0]
        forget(it)
        assert cached(it, 1) == LENGTH - 1  # files are still read
        assert it.service.state == "ok"
    (said,) = disk.said()
    assert os.strerror(number) in said
    assert "no more prefixes are written" in said


def test_a_full_disk_is_said_once_and_everything_goes_on(disk, tmp_path):
    """A real one, where this process may make one."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with disk(small) as it:
            assert [cached(it, i) for i in range(1, 9)] == [0] * 8
            forget(it)
            held = files(small)
            assert 0 < len(held) < 8
            assert cached(it, 1) == LENGTH - 1
            assert it.service.state == "ok"
        assert [path for path in small.rglob(".*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    (said,) = disk.said()
    assert "No space left on device" in said


def test_a_directory_that_cannot_be_made_is_said_once_and_everything_goes_on(disk, tmp_path):
    (tmp_path / "file").write_text("x")
    with disk(tmp_path / "file" / "prefixes") as it:
        assert [cached(it, i) for i in (1, 2, 3)] == [0, 0, 0]
        forget(it)
        assert cached(it, 1) == 0
    (said,) = disk.said()
    assert "Not a directory" in said


def test_a_directory_that_is_removed_meanwhile_is_made_again(disk):
    with disk() as it:
        cached(it, 1)
        forget(it)
        shutil.rmtree(disk.directory)
        assert cached(it, 1) == 0
        forget(it)
        assert cached(it, 1) == LENGTH - 1
    assert disk.said() == []
    assert len(files(disk.directory)) == 1


def test_a_file_that_is_damaged_meanwhile_is_not_served_and_said_once(disk):
    with disk() as it:
        cached(it, 1)
        forget(it)
        (path,) = files(disk.directory)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        assert cached(it, 1) == 0
        forget(it)
        assert cached(it, 1) == LENGTH - 1  # of a file that was written since
    (said,) = disk.said()
    assert "it was removed" in said


@pytest.mark.parametrize("years", [-50, 50])
def test_files_of_another_time_are_served(disk, years):
    with disk() as it:
        cached(it, 1)
    then = time.time() + years * A_YEAR_S
    for path in files(disk.directory):
        os.utime(path, (then, then))
    with disk() as it:
        assert cached(it, 1) == LENGTH - 1
        assert cached(it, 2) == 0
        forget(it)
        assert cached(it, 2) == LENGTH - 1
    assert disk.said() == []


@pytest.mark.parametrize("years", [-50, 50])
def test_a_clock_that_jumps_costs_no_file(disk, monkeypatch, years):
    with disk() as it:
        cached(it, 1)
        forget(it)
        now, now_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: now() + years * A_YEAR_S)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + years * A_YEAR_S * 10**9)
        assert cached(it, 2) == 0
        forget(it)
        assert (cached(it, 1), cached(it, 2)) == (LENGTH - 1, LENGTH - 1)
    assert disk.said() == []
    assert len(files(disk.directory)) == 2

"""A kernel is compared with the definition before it serves; here with a stand-in for kernels."""

import json
import os
import subprocess
import sys

import pytest

mx = pytest.importorskip("mlx.core")
stand_in = pytest.importorskip("tests.kernels.stand_in")
selfcheck = pytest.importorskip("kvstow.attention.selfcheck")
tasks = pytest.importorskip("kvstow.attention.tasks")

pytestmark = pytest.mark.mlx
kernels, new_process = stand_in.kernels, stand_in.new_process
ATTEND = tasks.AttendTask(8, 3, 64, "float32", 3, 1, ragged=False)
ENCODE = tasks.EncodeTask(8, 3, 64, "float32", search=False)


def notes():
    return sorted(selfcheck._folder().glob("*.json"))


@pytest.mark.parametrize(
    "task",
    [
        ATTEND,
        tasks.AttendTask(4, 2, 128, "bfloat16", 2, 4, ragged=True),
        tasks.AttendTask(5, 5, 64, "float16", 1, 8, ragged=True),
        tasks.PrefillTask(8, 3, 64, "bfloat16", ragged=False),
        ENCODE,
        tasks.EncodeTask(2, 8, 512, "bfloat16", search=True),
    ],
    ids=str,
)
def test_a_kernel_that_computes_the_definition_passes_and_is_checked_once(kernels, task):
    assert selfcheck.outcome(task).passed
    n = len(kernels.attended), len(kernels.encoded)
    assert sum(n)
    assert selfcheck.outcome(task).passed
    assert (len(kernels.attended), len(kernels.encoded)) == n


def test_a_check_of_prompts_covers_windows_rows_and_blocks(kernels):
    selfcheck.outcome(tasks.PrefillTask(8, 3, 128, "float32", ragged=True))
    called = [(call.window, call.longest) for call in kernels.attended]
    assert called == [(0, 700), (50, 700), (0, 200), (50, 200)] * 2
    assert {tuple(call.starts) for call in kernels.attended} == {(0, 37, 600)}
    shapes = {call.shape for call in kernels.attended}
    assert shapes == {(3, 6, 95, 128), (3, 6, 20, 128)}
    rows = [kernels.device().prefill_kernel((8, 3), 128, "float32", 3 * n).rows for n in (95, 20)]
    assert rows == [256, 128]  # each of the two kernels that prompts may take


@pytest.mark.usefixtures("kernels")
def test_a_prompt_that_has_no_kernel_is_no_check():
    outcome = selfcheck.outcome(tasks.PrefillTask(8, 3, 512, "float32", ragged=False))
    assert not outcome.kernel
    assert "prompts have kernels for head_dim 64, 128, 256, got 512" in outcome.why


def test_a_check_covers_windows_rows_and_several_tokens(kernels):
    selfcheck.outcome(tasks.AttendTask(8, 3, 64, "float32", 3, 4, ragged=True))
    assert {call.window for call in kernels.attended} == {0, 50}
    assert kernels.attended[0].starts == [0, 37, 600]
    assert kernels.attended[0].shape == (3, 6, 4, 64)


@pytest.mark.parametrize("task", [ATTEND, ENCODE], ids=["attend", "encode"])
def test_the_outcome_is_remembered_by_later_processes(kernels, monkeypatch, task):
    first = selfcheck.outcome(task)
    assert not first.remembered
    new_process(monkeypatch)
    kernels.forget()
    again = selfcheck.outcome(task)
    assert (again.passed, again.remembered, again.kernel) == (True, True, first.kernel)
    assert not kernels.attended
    assert not kernels.encoded
    assert selfcheck.remembered() == [(task, again)]


@pytest.mark.parametrize("task", [ATTEND, ENCODE], ids=["attend", "encode"])
def test_a_kernel_that_is_off_fails_and_stays_out(kernels, monkeypatch, task):
    kernels.attention_off, kernels.bytes_off = 0.1, True
    why = selfcheck.outcome(task).why
    assert "failed its self-check: " in why
    assert ("attention is off by" if task is ATTEND else "key scales differ") in why
    kernels.attention_off, kernels.bytes_off = 0.0, False
    assert selfcheck.outcome(task).why == why
    new_process(monkeypatch)
    assert selfcheck.outcome(task).why == why
    assert selfcheck.check(task).passed  # as the doctor does
    assert selfcheck.outcome(task).passed
    new_process(monkeypatch)
    assert selfcheck.outcome(task).passed


def test_nan_is_a_failure(kernels):
    kernels.attention_off = float("nan")
    assert "is off by nan" in selfcheck.outcome(ATTEND).why


def test_a_kernel_that_does_not_compile_fails_with_the_first_line(kernels):
    kernels.error = RuntimeError("no such architecture\nmany lines")
    assert "RuntimeError: no such architecture (" in selfcheck.outcome(ATTEND).why
    assert not selfcheck.outcome(ATTEND).passed


def test_an_illegal_access_is_remembered(kernels, monkeypatch):
    kernels.error = RuntimeError("cudaStreamSynchronize: an illegal memory access was encountered")
    assert not selfcheck.outcome(ATTEND).passed
    new_process(monkeypatch)
    kernels.error = None
    assert "illegal memory access" in selfcheck.outcome(ATTEND).why


def test_too_little_memory_is_not_remembered(kernels, monkeypatch):
    kernels.error = RuntimeError("[malloc] Unable to allocate: Out of memory")
    assert not selfcheck.outcome(ATTEND).passed
    assert not notes()
    new_process(monkeypatch)
    kernels.error = None
    assert selfcheck.outcome(ATTEND).passed


@pytest.mark.usefixtures("kernels")
def test_what_no_kernel_does_is_no_check():
    outcome = selfcheck.outcome(tasks.AttendTask(8, 3, 64, "float64", 1, 1, ragged=False))
    assert (
        outcome.why == "no kernel does this: ValueError: kernels take "
        "float16, bfloat16, float32, got float64"
    )
    assert not notes()


@pytest.mark.parametrize("what", ["source", "driver", "mlx", "device"])
def test_another_source_driver_mlx_or_gpu_is_checked_again(kernels, monkeypatch, what):
    selfcheck.outcome(ATTEND)
    new_process(monkeypatch)
    kernels.forget()
    here = selfcheck.identity()
    monkeypatch.setattr(selfcheck, "identity", lambda: here | {what: "another"})
    assert selfcheck.remembered() == []
    assert not selfcheck.outcome(ATTEND).remembered
    assert kernels.attended
    assert len(notes()) == 2


def test_an_interrupt_says_nothing_of_the_kernel(kernels):
    kernels.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        selfcheck.outcome(ATTEND)
    kernels.error = None
    assert selfcheck.outcome(ATTEND).passed


def left_behind(pid, host=None):
    """The note of a check that has not ended."""
    selfcheck.outcome(ATTEND)
    (path,) = notes()
    note = json.loads(path.read_text())
    del note["why"]
    path.write_text(json.dumps(note | {"pid": pid} | ({"host": host} if host else {})))


def test_a_check_that_ended_its_process_counts_as_failed(kernels, monkeypatch):
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        check=True,
        text=True,
    )
    left_behind(int(child.stdout))
    new_process(monkeypatch)
    kernels.forget()
    outcome = selfcheck.outcome(ATTEND)
    assert "ended before the check did" in outcome.why
    assert not kernels.attended
    assert selfcheck.check(ATTEND).passed


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("pid", "host"), [(os.getppid(), None), (1, "elsewhere")])
def test_a_check_that_still_runs_elsewhere_is_done_here_too(monkeypatch, pid, host):
    left_behind(pid, host)
    new_process(monkeypatch)
    assert selfcheck.outcome(ATTEND).passed


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_note_that_cannot_be_read_is_no_note(monkeypatch, text):
    selfcheck.outcome(ATTEND)
    notes()[0].write_text(text)
    new_process(monkeypatch)
    assert selfcheck.outcome(ATTEND).passed
    assert selfcheck.remembered()


def test_a_cache_directory_that_cannot_be_written_is_no_error(kernels, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSTOW_CACHE", str(tmp_path / "file"))
    assert selfcheck.outcome(ATTEND).passed
    assert selfcheck.check(ENCODE).passed
    assert selfcheck.remembered() == []
    kernels.error = RuntimeError("out of memory")
    assert not selfcheck.check(ENCODE).passed


def test_a_task_comes_back_from_its_json():
    prompt = tasks.PrefillTask(4, 2, 256, "float16", ragged=True)
    for task in (ATTEND, ENCODE, prompt):
        assert tasks.from_dict(json.loads(json.dumps(tasks.as_dict(task)))) == task

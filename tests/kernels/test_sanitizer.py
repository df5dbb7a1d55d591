"""What benchmarks/check_sanitizer.py makes of a tool's words, and of a tool that is a stand-in."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvstow

pytest.importorskip("mlx.core")

ROOT = Path(kvstow.__file__).parents[2]
SCRIPT = ROOT / "benchmarks/check_sanitizer.py"
pytestmark = pytest.mark.mlx
HEAD = "========= COMPUTE-SANITIZER\n"
RAN = "encode 64\n55 kernels, 110 launches on NVIDIA H200\nwith a stack frame: {}\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
NO_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
READ = """========= Invalid __global__ read of size 4 bytes
=========     at kvstow_decode+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Access at 0x7f3c7ec00200 is out of bounds
"""
RACE = """========= Error: Race reported between Write access at kvstow_decode+0xd0
=========     and Read access at kvstow_decode+0x100 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
REFUSED = """========= Error: Device not supported. Please refer to the "Supported Devices" section
=========
"""


tool = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.mark.parametrize(
    ("text", "code", "status", "errors"),
    [
        (HEAD + RAN + CLEAN, 0, "clean", 0),
        (HEAD + RAN + NO_RACES, 0, "clean", 0),
        (HEAD + READ + RAN + "========= ERROR SUMMARY: 1 error\n", 86, "found", 1),
        (HEAD + RACE, 86, "found", 1),
        (
            HEAD + "========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)\n",
            0,
            "found",
            0,
        ),
        (  # more than are printed
            HEAD
            + "========= ERROR SUMMARY: 128 errors\n"
            + "========= ERROR SUMMARY: 108 errors were not printed. Use --print-limit option\n",
            86,
            "found",
            128,
        ),
        (  # a fault that ends the program
            HEAD
            + READ
            + "========= Error: process didn't terminate successfully\n"
            + "========= ERROR SUMMARY: 2 errors\n",
            86,
            "found",
            2,
        ),
    ],
)
def test_what_the_summary_counts_is_the_outcome(text, code, status, errors):
    found = tool.outcome(text, code)
    assert (found.status, found.errors) == (status, errors)


@pytest.mark.parametrize(
    ("text", "code", "status"),
    [
        (HEAD + REFUSED + RAN + CLEAN, 0, "did not run"),
        (HEAD + REFUSED + RAN + "========= ERROR SUMMARY: 1 error\n", 86, "did not run"),
        (HEAD + READ * 4 + REFUSED + RAN + CLEAN, 0, "did not run"),
        (HEAD + "========= Internal Sanitizer Error: no memory\n" + RAN + CLEAN, 0, "did not run"),
        (
            HEAD + "========= Target application terminated before first API call\n",
            0,
            "did not run",
        ),
        ("unrecognised option '--kernel-name'\nUsage: compute-sanitizer\n", 1, "did not run"),
        (RAN, 0, "did not run"),
        ("", -11, "did not run"),
        (HEAD + "ModuleNotFoundError: No module named 'torch'\n" + CLEAN, 1, "check failed"),
        (HEAD + RAN + CLEAN, 1, "check failed"),  # results beyond their tolerance
        (HEAD + CLEAN, 0, "check failed"),  # nobody says that anything was launched
        (HEAD + "0 kernels, 0 launches on NVIDIA H200\n" + CLEAN, 0, "check failed"),
        (HEAD + RAN, None, "timeout"),
        (HEAD + RAN + CLEAN, None, "timeout"),
    ],
)
def test_what_was_not_checked_to_its_end_is_not_clean(text, code, status):
    assert tool.outcome(text, code).status == status


def test_what_was_launched_is_what_the_check_prints():
    found = tool.outcome(HEAD + RAN + CLEAN, 0)
    assert (found.kernels, found.launches, found.gpu) == (55, 110, "NVIDIA H200")
    source = (ROOT / "benchmarks/check_kernels.py").read_text()
    assert "{len(host.compiled)} kernels, {host.launches} launches on {" in source


def test_what_failed_says_why_first():
    assert "Device not supported" in tool.outcome(HEAD + READ * 4 + REFUSED + CLEAN, 0).said[0]
    said = tool.outcome(HEAD + "No module named 'torch'\n" + CLEAN, 1).said
    assert said == ["No module named 'torch'"]
    assert (
        tool.outcome(HEAD + READ + "========= ERROR SUMMARY: 1 error\n", 86)
        .said[0]
        .startswith("Invalid __global__ read")
    )


def test_only_options_that_the_tool_knows_are_given_to_it():
    known = "--kernel-name kernel_substring, kns --error-exitcode --padding"
    assert tool.options_of("memcheck", known) == [
        "--tool=memcheck",
        "--kernel-name=kernel_substring=kvstow",
        "--error-exitcode=86",
        "--padding=65536",
    ]
    with pytest.raises(ValueError, match="kernel_substring"):
        tool.options_of("memcheck", "--kernel-regex")


def test_every_tool_runs_the_same_programs_and_no_two_runs_share_ports():
    wanted = list(tool.runs(["memcheck", "racecheck", "initcheck"], [64, 128]))
    assert [one.part for one in wanted] == ["control"] * 3 + ["128", "64"] * 3
    assert {tuple(one.program) for one in wanted if one.part == "64"} == {
        ("check_kernels.py", "--sample", "--head-dim", "64")
    }
    assert len({one.port // 16 for one in wanted}) == len(wanted)


def test_our_kernels_and_the_control_pass_the_filter():
    control = (ROOT / "benchmarks/sanitizer_control.py").read_text()
    assert 'extern "C" __global__ void kvstow' in control


STAND_IN = """#!{python}
import os, subprocess, sys, time
words = " ".join(sys.argv[1:])
if "--help" in words or "--version" in words:
    sys.exit(print("--kernel-name kernel_substring --error-exitcode\\nVersion 2025.3.1.0 (build)"))
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
tool = sys.argv[1].removeprefix("--tool=")
summary = "========= ERROR SUMMARY: {{}} errors"
if tool == "racecheck":
    summary = "========= RACECHECK SUMMARY: {{0}} hazards displayed ({{0}} errors, 0 warnings)"
faults = int("sanitizer_control" in words)
print("========= COMPUTE-SANITIZER")
{behaviour}
print("55 kernels, 110 launches on NVIDIA H200")
print(summary.format(faults))
sys.exit(86 if faults else 0)
"""
FINE = "pass"


@pytest.fixture
def check(tmp_path):
    """Runs the script with a stand-in; returns what it printed, its exit code and its rows."""

    def checked(behaviour, *options):
        program, rows = tmp_path / "compute-sanitizer", tmp_path / "rows.jsonl"
        program.write_text(STAND_IN.format(python=sys.executable, behaviour=behaviour))
        program.chmod(0o755)
        command = [sys.executable, str(SCRIPT), "--output", str(rows), *options]
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
        )
        made = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        return done, made

    return checked


def test_every_tool_and_head_dim_has_a_row_and_all_clean_is_success(check, tmp_path):
    done, rows = check(FINE, "--head-dim", "64", "512", "--logs", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stdout + done.stderr
    tools = "memcheck", "racecheck", "initcheck"
    parts = "control", "64", "512"
    assert {(row["tool"], row["part"]) for row in rows} == {(t, p) for t in tools for p in parts}
    assert len(rows) == 9
    assert all(row["ok"] and row["commit"] and row["sanitizer"] == "2025.3.1.0" for row in rows)
    assert len(list((tmp_path / "logs").iterdir())) == 9
    (row,) = (row for row in rows if (row["tool"], row["part"]) == ("initcheck", "512"))
    assert row["run"] == (
        "compute-sanitizer --tool=initcheck --kernel-name=kernel_substring=kvstow "
        "--error-exitcode=86 python benchmarks/check_kernels.py --sample --head-dim 512"
    )


@pytest.mark.parametrize(
    ("behaviour", "statuses"),
    [
        ("faults = 2", {"control": "found", "64": "found"}),
        ("faults = 0", {"control": "clean", "64": "clean"}),  # a tool that sees nothing
        ("sys.exit(print('========= Error: Device not supported'))", "did not run"),
        ("sys.exit(1)", "did not run"),
    ],
)
def test_a_fault_and_a_tool_that_does_not_see_are_failures(check, behaviour, statuses):
    done, rows = check(behaviour, "--head-dim", "64", "--tools", "memcheck")
    assert done.returncode == 1
    if isinstance(statuses, str):
        statuses = dict.fromkeys(("control", "64"), statuses)
    assert {row["part"]: row["status"] for row in rows} == statuses
    assert not all(row["ok"] for row in rows)


@pytest.mark.parametrize("option", ["--timeout", "--limit"])
def test_a_run_that_takes_too_long_ends_with_its_program_and_is_a_row(check, tmp_path, option):
    program = tmp_path / "pid"
    sleeper = f"echo $$ > {program}; exec sleep 60"
    behaviour = f"subprocess.run({sleeper!r}, shell=True)"
    done, rows = check(behaviour, "--head-dim", "64", "--tools", "racecheck", option, "1")
    assert done.returncode == 1
    assert [row["status"] for row in rows] == ["timeout", "timeout"]
    assert rows[0]["exit_code"] is None
    status = Path(f"/proc/{program.read_text().strip()}/status")
    assert not status.exists() or "\nState:\tZ" in status.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sanitizer", "/nowhere/compute-sanitizer"], "got /nowhere/compute-sanitizer"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--tools", "leakcheck"], "invalid choice"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(check, options, said):
    done, rows = check(FINE, *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert not rows


def row(tool, part, status="clean", **others):
    counts = {"errors": 0, "warnings": 0, "kernels": 55, "launches": 110, "seconds": 9.0}
    about = {"said": [], "gpu": "NVIDIA H200", "sanitizer": "2025.3.1.0", "commit": "abc"}
    return {"tool": tool, "part": part, "status": status, **counts, **about, **others}


def test_the_page_says_how_each_run_ended():
    made = runpy.run_path(str(ROOT / "tools/make_reliability_docs.py"))["sanitized"]
    rows = [
        row("memcheck", "control", "found", errors=4),
        row("memcheck", "512", "found", errors=2),
        row("memcheck", "64"),
        row("racecheck", "control", commit="def"),
        row("racecheck", "64", "timeout", gpu=None),
        row("initcheck", "64", "did not run", said=["Error: a | b"], gpu=None),
    ]
    assert list(made(rows)) == [
        "| | memcheck | racecheck | initcheck |",
        "|---|---|---|---|",
        "| the kernel with a fault | found (4 errors) | **not found** | not run |",
        "| head_dim 64 | clean: 55 kernels, 110 launches | **not ended** after 9 s "
        "| **did not run**: Error: a \\| b |",
        "| head_dim 512 | **2 errors** | not run | not run |",
        "",
        "the kernel with a fault, head_dim 64, head_dim 512: compute-sanitizer 2025.3.1.0, "
        "NVIDIA H200, commit `abc`.  ",
        "the kernel with a fault: compute-sanitizer 2025.3.1.0, NVIDIA H200, commit `def`.  ",
    ]
    assert list(made([])) == ["This has not been run yet."]

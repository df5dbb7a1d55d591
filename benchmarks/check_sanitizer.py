"""The parity checks of the kernels under NVIDIA's compute-sanitizer, on this machine's GPU.

    python benchmarks/check_sanitizer.py --output benchmarks/results/sanitizer.jsonl

Each tool runs `check_kernels.py --sample` once for each head_dim, and `sanitizer_control.py`,
a kernel with a fault that it has to find. Only kernels whose names have ``kvstow`` in them
are watched: those of PyTorch make no inputs, which are copied from the host. PyTorch's memory
is not cached, so that each tensor is an allocation of its own, whose end memcheck knows, and
under memcheck allocations are kept apart. initcheck watches what kernels leave for each
other: planes are written whole, since some versions count all 16 bytes of an asynchronous
copy that reads fewer.

One JSON row for each run, as it ends; exit code 1 unless every check ran to its end and was
clean, and every control was found.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstow import use_fast_blas
from kvstow.evaluate.environment import environment
from kvstow.scheme import HEAD_DIMS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 86  # exit code for faults, which neither Python nor a signal has
BENCHMARKS = Path(__file__).parent
OPTIONS = {
    # Calls of the CUDA API that fail are left to those that make them.
    "memcheck": ["--padding=65536", "--report-api-errors=no", "--destroy-on-device-error=kernel"],
    # PyTorch copies what its own kernels wrote, which are not watched.
    "initcheck": ["--check-api-memory-access=no"],
}
COMMON = [
    "--kernel-name=kernel_substring=kvstow",
    f"--error-exitcode={FOUND}",
    "--target-processes=application-only",
    "--launch-timeout=300",  # until PyTorch is imported
    "--print-limit=20",
]

SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?$", re.MULTILINE)
RACES = re.compile(
    r"^=+ RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)",
    re.MULTILINE,
)
RAN = re.compile(r"^(\d+) kernels, (\d+) launches on (.+)$", re.MULTILINE)
# What a tool says of itself where it did not check; its summary may count no errors then.
# A race is an "Error:" too, and so is a program that ended badly.
OWN_ERROR = re.compile(r"(Internal Sanitizer )?Error: (?!Race|Potential|process didn't)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run found.

    Attributes:
        status: ``clean``, ``found``, ``check failed`` (the program itself), ``did not run``
            (the tool refused, or came to no summary) or ``timeout``.
        errors: Of the tool's summary; None without one.
        warnings: Of racecheck's.
        kernels: Different kernels that the program launched; None if it did not end.
        launches: Of these.
        gpu: Its name.
        said: The first lines of the tool but its summary, those about itself before others, and
            the last of the program where it was not checked to its end.
    """

    status: str
    errors: int | None
    warnings: int
    kernels: int | None
    launches: int | None
    gpu: str | None
    said: list[str]


def outcome(text: str, code: int | None) -> Outcome:
    """What a run printed, and its exit code; None if it was ended for its time."""
    errors, warnings = counted(text)
    ran = RAN.search(text)
    lines = text.splitlines()
    marked = [line for line in lines if line.startswith("=====")]
    said = [line.lstrip("= ") for line in marked if "SUMMARY" not in line]
    said = [line for line in said if line not in ("", "COMPUTE-SANITIZER")]
    refused = [line for line in said if OWN_ERROR.match(line)]
    said = [*refused, *(line for line in said if line not in refused)][:12]
    if code is None:
        status = "timeout"
    elif errors is None or refused:
        status = "did not run"
    elif errors or warnings:
        status = "found"
    elif code or not ran or not int(ran[2]):
        status = "check failed"
    else:
        status = "clean"
    if status not in ("clean", "found"):
        said += [line for line in lines if line and not line.startswith("=====")][-5:]
    kernels, launches, gpu = (int(ran[1]), int(ran[2]), ran[3]) if ran else (None, None, None)
    return Outcome(status, errors, warnings, kernels, launches, gpu, said)


def counted(text: str) -> tuple[int | None, int]:
    """Errors and warnings of the summary; None without one."""
    if races := RACES.search(text):
        hazards, errors, warnings = map(int, races.groups())
        return errors, max(warnings, hazards - errors)
    summary = SUMMARY.search(text)
    return (int(summary[1]), 0) if summary else (None, 0)


@dataclass(frozen=True, slots=True)
class Run:
    """One tool on one program; ``part`` is ``control`` or a head_dim."""

    tool: str
    part: str
    program: list[str]
    port: int


def runs(tools: Sequence[str], head_dims: Sequence[int]) -> Iterator[Run]:
    """Controls, which are short and say whether the rest is worth its time, then the slowest."""
    port = 49152
    slowest = sorted(tools, key=("racecheck", "initcheck", "memcheck", "synccheck").index)
    for tool in slowest:
        yield Run(tool, "control", ["sanitizer_control.py", tool], port)
        port += 16  # each run has its own, of which the tool may take ten
    for tool in slowest:
        for head_dim in sorted(head_dims, reverse=True):
            program = ["check_kernels.py", "--sample", "--head-dim", str(head_dim)]
            yield Run(tool, str(head_dim), program, port)
            port += 16


def options_of(tool: str, known: str) -> list[str]:
    """Options for a tool, less those that this version's help does not name.

    Raises:
        ValueError: If it cannot be told which kernels to watch.
    """
    wanted = [*COMMON, *OPTIONS.get(tool, ())]
    if "kernel_substring" not in known:
        raise ValueError(
            "this compute-sanitizer cannot be told which kernels to watch: its --help names no "
            "'kernel_substring'; take that of CUDA 12 or later"
        )
    return [f"--tool={tool}"] + [word for word in wanted if word.split("=")[0] in known]


def run(sanitizer: Sequence[str], one: Run, timeout_s: float) -> tuple[str, int | None]:
    """What a run printed, and its exit code; None if it took too long."""
    script, *arguments = one.program
    command = [*sanitizer, sys.executable, str(BENCHMARKS / script), *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            stdout=printed,  # no pipe, which a program that outlives the tool would keep open
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)  # the program too
            process.wait()
        printed.seek(0)
        return printed.read(), code


class Checker:
    """Makes the rows of one machine's sanitizer.

    Args:
        sanitizer: The tool.
        timeout_s: For one run.
        limit_s: For all of them.
        logs: Folder for what was printed.
    """

    def __init__(
        self, sanitizer: Path, timeout_s: float, limit_s: float, logs: Path | None
    ) -> None:
        def asked(option: str) -> str:
            command = [str(sanitizer), option]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stdout + done.stderr

        self._sanitizer, self._timeout_s, self._logs = str(sanitizer), timeout_s, logs
        self._end = time.perf_counter() + limit_s
        self._help = asked("--help")
        version = re.search(r"^Version (\S+)", asked("--version"), re.MULTILINE)
        self.version = version[1] if version else None

    def options(self, one: Run) -> list[str]:
        """See `options_of`."""
        port = [f"--port={one.port}"] if "--port" in self._help else []
        return options_of(one.tool, self._help) + port

    def row(self, one: Run) -> dict[str, Any]:
        """Run it."""
        started = time.perf_counter()
        options = self.options(one)
        timeout_s = max(0.0, min(self._timeout_s, self._end - started))
        text, code = run([self._sanitizer, *options], one, timeout_s)
        if self._logs is not None:
            (self._logs / f"{one.tool}-{one.part}.txt").write_text(text, encoding="utf-8")
        found = outcome(text, code)
        script, *arguments = one.program
        program = ["python", f"benchmarks/{script}", *arguments]
        return {
            "bench": "sanitizer",
            "tool": one.tool,
            "part": one.part,
            "ok": found.status == ("found" if one.part == "control" else "clean"),
            **asdict(found),
            "exit_code": code,
            "seconds": round(time.perf_counter() - started, 1),
            "sanitizer": self.version,
            "run": shlex.join(["compute-sanitizer", *options, *program]),
        }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS[:3])
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--jobs", type=int, default=6, help="runs at once")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all runs")
    parser.add_argument("--logs", type=Path, help="folder for all that was printed")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    options = parser.parse_args()
    if options.jobs < 1 or not options.timeout > 0 or not options.limit > 0:
        parser.error(
            "--jobs must be at least 1, --timeout and --limit more than 0, "
            f"got {options.jobs}, {options.timeout:g} and {options.limit:g}"
        )
    path = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    tool = shutil.which(options.sanitizer, path=path)
    if tool is None:
        parser.error(
            "--sanitizer must be a program, as a path or a name on PATH or in /usr/local/cuda/bin, "
            f"got {options.sanitizer}, which is not there"
        )
    options.sanitizer = Path(tool)
    return options


def summary(row: dict[str, Any]) -> str:
    """A run in a line."""
    line = f"{row['tool']:9} {row['part']:7} {row['status']} in {row['seconds']} s"
    if row["errors"] is not None:
        line += f": {row['errors']} errors, {row['warnings']} warnings"
    if row["kernels"] is not None:
        line += f"; {row['kernels']} kernels, {row['launches']} launches"
    return line


def main() -> None:
    options = arguments()
    limits = options.timeout, options.limit
    checker = Checker(options.sanitizer.absolute(), *limits, options.logs)
    wanted = list(runs(options.tools, options.head_dim))
    try:
        checker.options(wanted[0])
    except ValueError as error:
        sys.exit(str(error))
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
    about = environment(" ".join(["python", *sys.argv]), use_fast_blas())
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(checker.row, one) for one in wanted]):
            row = done.result()
            failed += not row["ok"]
            print(summary(row), flush=True)
            if not row["ok"]:
                print(*(f"    {line}" for line in row["said"]), sep="\n", flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    print(json.dumps({**row, **about}), file=file)
    print(f"{failed} of {len(wanted)} runs failed" if failed else "clean; every control was found")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

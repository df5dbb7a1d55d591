"""Before a kernel first serves on a machine it is compared with the definition there.

Attention must be within the tolerance of `TOLERANCE`, with NaN and noise outside the rows, and
encoded planes equal byte for byte. The outcome is kept in the cache directory, so it takes
seconds once for each kernel, most of them for its compilation. A kernel that failed is not used,
until something of `machine.identity` changes or `kvstow doctor --parity` checks it again.

A check that ends the process leaves a note behind, and counts as failed from then on.
"""

import contextlib
import hashlib
import json
import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.attention import parity
from kvstow.attention.tasks import Task, as_dict, from_dict
from kvstow.cache_dir import cache_dir, write_note
from kvstow.kernels import backend as kernels
from kvstow.kernels.machine import identity

_AGAIN = "kvstow doctor --parity checks it again"
# Not the kernel's doing, unlike "an illegal memory access".
_TOO_LITTLE_MEMORY = ("out of memory", "unable to allocate", "memoryallocation")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a check.

    Attributes:
        kernel: The name of what was checked; empty if there is no such kernel.
        why: Why it is not used; empty if it passed.
        remembered: Whether an earlier process has checked it.
    """

    kernel: str
    why: str
    remembered: bool = False

    @property
    def passed(self) -> bool:
        """Whether the kernel is used."""
        return not self.why

    @property
    def warning(self) -> str:
        """What a user should know of a failure."""
        return f"a fused kernel is not used, slower operations are instead: {self.why}"


_outcomes: dict[Task, Outcome] = {}
_lock = threading.RLock()


def outcome(task: Task) -> Outcome:
    """Check what does `task`, unless that was done on this machine already. Never raises."""
    found = _outcomes.get(task)
    if found is None:
        with _lock:
            found = _outcomes.get(task) or _found(task)
            _outcomes[task] = found
    return found


def check(task: Task) -> Outcome:
    """Check it now, whatever is remembered. Never raises."""
    with _lock:
        try:
            name = task.name(kernels.device())
        except Exception as error:
            made = Outcome("", f"no kernel does this: {parity.say(error)}")
        else:
            made = _checked(task, name)
        _outcomes.clear()  # tasks share kernels: they read what was written just now
        _outcomes[task] = made
    return made


def outcomes() -> list[Outcome]:
    """Of the kernels that this process asked for. Waits for no check that runs."""
    return list(_outcomes.copy().values())


def remembered() -> list[tuple[Task, Outcome]]:
    """What was checked on this machine, as it is now, by any process."""
    found = []
    here = identity()
    for path in sorted(_folder().glob("*.json")):
        note = _read(path)
        if note is not None and all(note.get(key) == value for key, value in here.items()):
            try:
                task = from_dict(note["task"])
            except (LookupError, TypeError, ValueError):
                continue
            found.append((task, _found(task)))
    return found


def _found(task: Task) -> Outcome:
    try:
        name = task.name(kernels.device())
        note = _read(_path(name))
    except Exception as error:
        return Outcome("", f"no kernel does this: {parity.say(error)}")
    if note is None or _is_running_elsewhere(note):
        return _checked(task, name)
    if "why" in note:
        return Outcome(name, str(note["why"]), remembered=True)
    why = f"the process that checked {name} ended before the check did ({_AGAIN})"
    return Outcome(name, why, remembered=True)


def _checked(task: Task, name: str) -> Outcome:
    path = _path(name)
    started = {**identity(), "task": as_dict(task), "pid": os.getpid(), "host": platform.node()}
    write_note(path, json.dumps(started, indent=2))
    try:
        why = parity.difference(task)
        if why:
            why = f"{name} failed its self-check: {why} ({_AGAIN})"
    except Exception as error:
        why = f"{name} failed its self-check: {parity.say(error)} ({_AGAIN})"
        if any(said in str(error).lower() for said in _TOO_LITTLE_MEMORY):
            _forget(path)
            return Outcome(name, why)
    except BaseException:  # an interrupt says nothing of the kernel
        _forget(path)
        raise
    write_note(path, json.dumps({**started, "kernel": name, "why": why}, indent=2))
    return Outcome(name, why)


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _path(name: str) -> Path:
    where = "|".join([name, *identity().values()])
    digest = hashlib.sha256(where.encode()).hexdigest()[:16]
    return _folder() / f"{name}-{digest}.json"


def _folder() -> Path:
    return cache_dir() / "kernels"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def _is_running_elsewhere(note: dict[str, Any]) -> bool:
    """Whether it is the note of a check that may still end well."""
    if "why" in note:
        return False
    if note.get("host") != platform.node():
        return True  # a directory that machines share: nobody here can say
    pid = note.get("pid")
    if not isinstance(pid, int) or pid <= 0 or pid == os.getpid():
        return False  # one of that number has ended, if it is ours now
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True

"""Processes of this machine that work together, started as a user would."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import kvstow

ROOT = Path(kvstow.__file__).parents[2]
LAUNCH = shutil.which("mlx.launch", path=Path(sys.executable).parent)
needs_ring = pytest.mark.skipif(
    LAUNCH is None or not mx.distributed.is_available("ring"),
    reason="this mlx has no ring back-end",
)


def launch(*command, n=2, **env):
    """Run a command in `n` processes; what all of them printed."""
    port = free_port()
    return subprocess.run(
        [LAUNCH, "--backend", "ring", "-n", str(n), "--starting-port", str(port), "--", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))} | env,
    )


def free_port():
    """A port that is free now, as is the next one: each process listens on one."""
    for _ in range(100):
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise RuntimeError("no two free ports in a row")


def objects(done):
    """The JSON objects of standard output, which also has lines of mlx's launcher."""
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]

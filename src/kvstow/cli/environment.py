"""What a measured figure depends on beside the code, for every row of results."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstow.blas import BlasReport


def environment(command: str, blas: BlasReport) -> dict[str, Any]:
    """What a figure depends on beside the code: command, commit, machine, versions."""
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": command,
        "commit": commit.stdout.strip() or None,
        "machine": f"{processor()} ({platform.system()} {platform.machine()})",
        "blas": blas.name,
        "mlx": _version("mlx"),
        "mlx_lm": _version("mlx-lm"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # on the path without being installed
        return None


def processor() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"

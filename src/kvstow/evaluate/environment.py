"""What a measured figure depends on beside the code, for every row of results."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kvstow.blas import BlasReport
from kvstow.require import require

CHECKOUT = Path(__file__).parents[3]


def environment(command: str, blas: BlasReport) -> dict[str, Any]:
    """What a figure depends on beside the code: command, commit, machine, versions."""
    device = require("mlx.core").device_info().get("device_name")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "machine": f"{processor()} ({platform.system()} {platform.machine()})",
        "device": device or processor(),
        "blas": blas.name,
        "kvstow": version("kvstow"),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def commit() -> str | None:
    """The commit of the checkout that runs; None for an installed package.

    KVSTOW_COMMIT names it where the checkout was copied without its history.
    """
    if told := os.environ.get("KVSTOW_COMMIT"):
        return told
    if not (CHECKOUT / ".git").exists():  # the package may lie inside some other repository
        return None
    described = subprocess.run(
        ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=10"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def version(package: str) -> str | None:
    """Of an installed package; None if it is not."""
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

"""What kvstow finds on this machine: versions, devices, paths of attention, kernels, parity."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstow.blas import use_fast_blas
from kvstow.errors import MissingDependency
from kvstow.evaluate.environment import processor, version
from kvstow.require import require

PACKAGES = ("kvstow", "mlx", "mlx-lm", "numpy")


@dataclass(slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        versions: Package to its version; None if it is not installed.
        machine: The processor and the system.
        device: What MLX computes on: its default, and what it says of that.
        blas: Of MLX's CPU back-end, and the library's path.
        paths: Path of attention to why it does not exist here; empty if it does.
        kernels: What their self-checks are remembered by, why auto does not use them, and kernel
            to why it is not used.
        parity: Check to how it differs, of those that were run.
        problems: What makes this a failure.
    """

    versions: dict[str, str | None]
    machine: str
    device: dict[str, str] = field(default_factory=dict)
    blas: dict[str, str | None] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    parity: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "healthy": self.healthy}


def diagnose(*, parity: bool, on_step: Callable[[str], None]) -> Diagnosis:
    """Look at this machine.

    Args:
        parity: Whether to run the parity suite, which checks kernels again.
        on_step: Told what is being checked.
    """
    found = Diagnosis(
        versions={package: version(package) for package in PACKAGES},
        machine=f"{processor()} ({platform.system()} {platform.machine()})",
    )
    try:
        require("mlx_lm")
        suite = require("kvstow.evaluate.parity")
    except MissingDependency as error:
        found.paths = dict.fromkeys(("eager", "deferred", "fused"), str(error))
        found.problems.append(str(error))
        return found
    blas = use_fast_blas()
    found.blas = {"name": blas.name, "path": None if blas.path is None else str(blas.path)}
    if parity:
        found.parity = {check.name: check.why for check in suite.run(on_step)}
        found.problems += [f"{name}: {why}" for name, why in found.parity.items() if why]
    _look_at_device(found)
    return found


def _look_at_device(found: Diagnosis) -> None:
    mx = require("mlx.core")
    fused = require("kvstow.attention.fused")
    selfcheck = require("kvstow.attention.selfcheck")
    identity = require("kvstow.kernels.machine").identity()
    found.device = {
        "default": str(mx.default_device()),
        **{str(key): str(value) for key, value in mx.device_info().items()},
    }
    why = fused.why_no_device()
    found.paths = {"eager": "", "deferred": "", "fused": why}
    if why:
        return
    outcomes = {outcome.kernel: outcome.why for _, outcome in selfcheck.remembered()}
    found.kernels = {**identity, "unasked": fused.why_not_unasked(), "checked": outcomes}
    failed = [why for why in outcomes.values() if why]
    found.problems += [why for why in failed if not any(why in p for p in found.problems)]

"""``kvstow doctor``: what works on this machine, and what does not and why."""

import json

import click

from kvstow.cli.params import as_json
from kvstow.cli.progress import progress_bar
from kvstow.evaluate.doctor import Diagnosis, diagnose


@click.command()
@click.option(
    "--parity",
    is_flag=True,
    help="Compare codec, attention and kernels with the definition, on this device.",
)
@as_json
def doctor(*, parity: bool, as_json: bool) -> None:
    """Say what works on this machine, and what does not and why.

    Prints versions, devices, the BLAS, which paths of attention there are, and which
    kernels have passed their self-check. With --parity also compares what this device
    computes with the definition, which takes seconds on a CPU and minutes where kernels
    are compiled; kernels that had failed are checked again.

    The exit code is 1 if something is missing or differs.
    """
    with progress_bar("checking", shown=parity) as step:
        found = diagnose(parity=parity, on_step=lambda said: step(0, 1, said))
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else describe(found))
    if not found.healthy:
        click.get_current_context().exit(1)


def describe(found: Diagnosis) -> str:
    """For people, several lines."""
    versions = ", ".join(f"{name} {v or 'not installed'}" for name, v in found.versions.items())
    lines = [f"versions  {versions}", f"machine   {found.machine}"]
    if found.device:
        default = found.device["default"]
        name = found.device.get("device_name", "")
        lines.append(f"device    {default} {name}".rstrip())
    if found.blas:
        lines.append(f"BLAS      {found.blas['name']} {found.blas['path'] or ''}".rstrip())
    lines += [f"{path:9} {why or 'works'}" for path, why in found.paths.items()]
    if found.kernels:
        lines.append(
            f"kernels   source {found.kernels['source']}, driver {found.kernels['driver']}"
        )
        if why := found.kernels["unasked"]:
            lines.append(f"  only where asked for: {why}")
        outcomes = found.kernels["checked"]
        lines += [f"  {name}: {why or 'passed'}" for name, why in outcomes.items()]
        if not outcomes:
            lines.append("  none was checked on this machine yet: each is before its first use")
    lines += [f"parity    {name}: {why or 'equal'}" for name, why in found.parity.items()]
    lines += [f"problem   {why}" for why in found.problems]
    return "\n".join(lines)

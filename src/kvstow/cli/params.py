"""Option types shared by all commands."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from kvstow.errors import PolicyError, SchemeError
from kvstow.policy import Policy
from kvstow.scheme import Scheme

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e\d{1,2})?) ?(?P<unit>[a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def scheme(value: str) -> Scheme:
    """Read ``turbo:k8v3``; a `SchemeError` is a usage error on the flag."""
    try:
        return Scheme.parse(value)
    except SchemeError as error:
        raise click.BadParameter(str(error)) from error


class PolicyFile(click.Path):
    """A JSON file that is a `Policy`; what it gets wrong is a usage error on the flag."""

    name = "file"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Policy:  # type: ignore[override]
        """Read the file."""
        if isinstance(value, Policy):
            return value
        path = Path(str(super().convert(value, param, ctx)))
        try:
            return Policy.read(path)
        except PolicyError as error:
            self.fail(str(error), param, ctx)


def stored_under(kv_quant: Scheme, kv_policy: Policy | None) -> Scheme | Policy:
    """What the two options ask for together.

    Raises:
        click.UsageError: If both are given.
    """
    if kv_policy is None:
        return kv_quant
    source = click.get_current_context().get_parameter_source("kv_quant")
    if source is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError(f"give one of --kv-quant and --kv-policy, got both ({kv_quant})")
    return kv_policy


def size(value: str) -> int:
    """Read ``24GB`` as bytes. GB is 10^9 bytes, GiB is 2^30."""
    match = _SIZE.fullmatch(str(value).strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    n_bytes = int(float(match["number"]) * unit) if match and unit else 0
    if n_bytes < 1:
        raise click.BadParameter(
            f"{value!r} is not a size; expected a number of bytes with or without a unit, "
            "for example 24GB (10^9 bytes), 24GiB (2^30 bytes), 512MB or 16e9"
        )
    return n_bytes


class Finite(click.FloatRange):
    """A range without nan and the infinities, which pass every comparison."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Read a number as `click.FloatRange` does."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


kv_quant = click.option(
    "--kv-quant",
    type=scheme,
    default=Scheme.default,
    show_default=True,
    help="How keys and values are stored: off, affine:<bits> or turbo:k<bits>v<bits>.",
)


kv_policy = click.option(
    "--kv-policy",
    type=PolicyFile(),
    help="A JSON file that says which layers take which scheme.",
)


def kv_quants(default: Sequence[str]) -> Callable[[Any], Any]:
    """Make a ``--kv-quant`` that may be repeated, for commands that compare schemes."""
    return click.option(
        "--kv-quant",
        "schemes",
        type=scheme,
        multiple=True,
        default=default,
        help=f"A scheme to show; may be repeated.  [default: {', '.join(default)}]",
    )


model = click.option(
    "--model",
    default="smollm2",
    show_default=True,
    help="smollm2 (the demo model), a GGUF file, a directory that mlx-lm can load, or a hub id.",
)
prompt = click.option("--prompt", "-p", help="The prompt; - reads it from standard input.")
prompt_file = click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A UTF-8 text file that holds the prompt.",
)
chat_template = click.option(
    "--chat-template/--no-chat-template",
    default=True,
    show_default=True,
    help="Whether the prompt is wrapped as a chat turn, where the tokenizer can.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
fetch = click.option(
    "--fetch",
    type=click.Choice(["auto", "eager", "deferred", "fused"]),
    default="auto",
    show_default=True,
    help="How attention reaches packed tokens: eager decodes keys and values, deferred "
    "un-rotates the output instead of every value, fused leaves steps of few tokens to kernels "
    "(on a GPU; on NVIDIA's prompts too); auto is the last of these that model and machine can "
    "do, on a Mac deferred.",
)
dtype = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of weights and activations.  [default: as stored; for GGUF files float32 on CPU, "
    "bfloat16 elsewhere]",
)

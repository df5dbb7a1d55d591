"""A command that `mlx.launch` runs in several processes, which share the work of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvstow.cli.console import say
from kvstow.cli.launcher import told_rank
from kvstow.models import skeleton
from kvstow.require import require


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those that were started together.

    Attributes:
        group: mlx's group of them; None for a process alone.
        size: How many there are.
        rank: Which one this is; the first alone prints.
    """

    group: Any = None
    size: int = 1
    rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process prints."""
        return self.rank == 0

    def print(self, result: str) -> None:
        """Print a result, once for all processes."""
        if self.is_first:
            click.echo(result)

    def say(self, line: str) -> None:
        """See `console.say`, once for all processes."""
        if self.is_first:
            say(line)


def launched() -> Processes:
    """The processes that were started with this one, if a launcher says that there are some.

    Raises:
        ClickException: If they do not find each other: each would answer alone.
    """
    told = told_rank()
    if told is None:
        return Processes()
    group = require("mlx.core").distributed.init()
    if group.size() == 1 and told != "0":
        raise click.ClickException(
            f"this is process {told} of several, and mlx finds no other: see mlx.launch --backend"
        )
    return Processes(group, group.size(), group.rank()) if group.size() > 1 else Processes()


def refuse_split(config: Mapping[str, Any], dtype: str | None, processes: Processes) -> None:
    """Refuse a model whose heads do not divide over the processes, before weights load.

    Args:
        config: As in config.json.
        dtype: See `skeleton`.
        processes: Those that share the work.

    Raises:
        ModelFileError: As `skeleton`.
        UnsupportedModel: As `check_split`.
    """
    if processes.size > 1:
        parallel = require("kvstow.integrations.mlx_lm.tensor_parallel")
        parallel.check_split(skeleton(config, dtype), processes.group)


def shared_seed(seed: int | None, processes: Processes) -> int | None:
    """The same seed in every process: each draws the next token itself, from the same logits."""
    if seed is not None or processes.size == 1:
        return seed
    mx = require("mlx.core")
    drawn = mx.random.randint(0, 2**31 - 1, (), mx.int32) * int(processes.is_first)
    return int(mx.distributed.all_sum(drawn, group=processes.group))

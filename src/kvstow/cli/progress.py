"""One progress bar on standard error, and only on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Step = Callable[..., None]
SPEED_OVER_S = 3600.0  # a batch of prompts takes minutes: rich's own 30 s would see no two steps


@contextmanager
def progress_bar(label: str, *, shown: bool = True) -> Iterator[Step]:
    """Yield ``step(done, total, label=label)``, which moves the bar; it is gone after the block.

    Args:
        label: What is being done.
        shown: False for work too short to watch.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    visible = shown and console.is_terminal
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not visible,
        speed_estimate_period=SPEED_OVER_S,
    ) as progress:
        task = progress.add_task(label, total=None)

        def step(done: float, total: int, label: str = label) -> None:
            progress.update(task, completed=done, total=total, description=label)

        yield step

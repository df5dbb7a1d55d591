"""kvstow's own warnings, as the program prints them: one line each, and each once."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from kvstow.errors import KvstowWarning


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print kvstow's own warnings on standard error; others as Python does.

    Filters that the user gave Python (``PYTHONWARNINGS``, ``-W``) hold.
    """
    with warnings.catch_warnings():
        show, printed = warnings.showwarning, set()

        def show_line(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if not issubclass(category, KvstowWarning):
                show(message, category, *where, **more)
            elif str(message) not in printed:
                printed.add(str(message))
                click.echo(f"warning: {message}", err=True)

        warnings.showwarning = show_line
        if not sys.warnoptions:
            warnings.simplefilter("always", KvstowWarning)
        yield

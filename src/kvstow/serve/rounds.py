"""How long the engine decodes before it looks again at who comes and who has gone."""

import time
from collections.abc import Iterator

ROUND_S = 0.1  # mlx-lm's is 0.5


class Rounds:
    """A round of steps each time it is gone through, at least one; see mlx-lm's `TimeBudget`.

    That one goes by the time of day: set back by an hour, it makes a round of an hour, in which
    nobody comes or goes.
    """

    def __iter__(self) -> Iterator[None]:
        end = time.monotonic() + ROUND_S
        yield
        while time.monotonic() < end:
            yield

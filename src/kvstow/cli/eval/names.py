"""How tables call arms: by their spelling, but a policy by a name, which a caption explains."""

from collections.abc import Iterable

from kvstow.evaluate.arms import Arm
from kvstow.evaluate.rows import Row


def label(row: Row) -> str:
    """The arm of a row, short enough for a column."""
    return Arm.parse(row["arm"]).label


def caption(rows: Iterable[Row]) -> str | None:
    """What the names of policies stand for; None if there is no policy."""
    named = {label(row): row["arm"] for row in rows if label(row) != row["arm"]}
    return "\n".join(f"{name}: {arm}" for name, arm in named.items()) or None

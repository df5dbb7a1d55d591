"""Names beside points, where they hide neither a point nor each other."""

from collections.abc import Iterator, Sequence
from itertools import product

from matplotlib.axes import Axes

POINTS = 7  # the size of the letters
LETTER = 0.62  # their mean width, in sizes
MARKER = 4.0  # half the width of a marker, in points
Box = tuple[float, float, float, float]


def label_points(
    axes: Axes, points: Sequence[tuple[float, float, str]], others: Sequence[tuple[float, float]]
) -> None:
    """Write a name beside each of `points`.

    Args:
        axes: Their limits must be set, and are not changed.
        points: Where it is, and its name.
        others: What else must not be hidden.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        return
    figure.draw_without_rendering()  # only now is it known where a point is
    scale = 72 / figure.dpi
    x0, y0, x1, y1 = (edge * scale for edge in axes.bbox.extents)
    places = axes.transData.transform([*[(x, y) for x, y, _ in points], *others]) * scale
    taken: list[Box] = [
        (x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in map(tuple, places)
    ]
    for (x, y, name), (at_x, at_y) in zip(points, places[: len(points)], strict=True):
        width, height = LETTER * POINTS * len(name), 1.2 * POINTS
        tried = [
            (_cost(box, taken, (x0, y0, x1, y1)) + 0.02 * far, i, dx, dy, box)
            for i, (dx, dy, far) in enumerate(_offsets(width, height))
            for box in [(at_x + dx, at_y + dy, at_x + dx + width, at_y + dy + height)]
        ]
        _, _, dx, dy, box = min(tried)
        taken.append(box)
        line = {"arrowstyle": "-", "lw": 0.4, "color": "#767676", "shrinkA": 0, "shrinkB": 2}
        is_far = min(abs(dx), abs(dx + width)) > 2 * MARKER + 1 or abs(dy + height / 2) > 14
        axes.annotate(
            name,
            (x, y),
            (dx, dy),
            textcoords="offset points",
            fontsize=POINTS,
            arrowprops=line if is_far else None,
            va="bottom",
        ).set_in_layout(False)


def _offsets(width: float, height: float) -> Iterator[tuple[float, float, float]]:
    """Where a name may begin, from its point: right, left, above and below, near first."""
    gap = MARKER + 2
    for step, (column, row) in product(
        range(5), ((0, 0), (1, 0), (2, 1), (2, -1), (0, 1), (0, -1), (1, 1), (1, -1))
    ):
        up = row * (gap + height / 2 + step * height)
        start = (gap + step * 3, -gap - width - step * 3, -width / 2)[column]
        if step == 0 or row:
            yield start, up - height / 2, step + abs(row) * 0.5 + column * 0.1


def _cost(box: Box, taken: Sequence[Box], inside: Box) -> float:
    """How much of `box` is over something else, or outside; 0 is free."""
    area = (box[2] - box[0]) * (box[3] - box[1])
    covered = sum(_overlap(box, other) for other in taken) / area
    return covered + 3 * (1 - _overlap(box, inside) / area)


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0)

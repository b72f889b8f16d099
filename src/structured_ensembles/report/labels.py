"""Labels of points, placed where they hide least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes

Point = tuple[float, float]
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))  # the best first
GAPS = (5.0, 8.0, 12.0, 17.0)  # points from the centre of a marker
# Distance and side of a label, the best first.
OFFSETS = [(gap if 0 in side else gap * math.sqrt(0.5), *side) for gap in GAPS for side in SIDES]
MARKER = 4.0  # half its size
STEP = 2.0  # between sampled points of a line


class Label(NamedTuple):
    """Text of the point (x, y) in data coordinates; a point without text is kept free of other labels."""

    x: float
    y: float
    text: str
    colour: str = "black"


class Box(NamedTuple):
    """Rectangle, in points."""

    left: float
    bottom: float
    right: float
    top: float

    def shared(self, other: Box) -> float:
        """Return the area of the overlap with another box."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0) * max(height, 0)

    def holds(self, point: Point) -> bool:
        """Tell whether a point lies inside."""
        return self.left < point[0] < self.right and self.bottom < point[1] < self.top


def place_labels(axis: Axes, labels: Sequence[Label], lines: Sequence[Sequence[Point]] = ()) -> None:
    """Write each label beside its point, inside the frame, where it hides other labels, points and lines least.

    lines: other drawn lines, each as its corners (x, y). The layout and the limits of the axis must be final.
    """
    scale = 72 / axis.figure.dpi
    frame = Box(*(scale * edge for edge in axis.get_window_extent().extents))

    def to_points(x: float, y: float) -> Point:
        across, up = axis.transData.transform((x, y))
        return scale * across, scale * up

    drawn = [sample for line in lines for sample in _sample_line([to_points(*corner) for corner in line])]
    centres = [to_points(label.x, label.y) for label in labels]
    markers = [Box(x - MARKER, y - MARKER, x + MARKER, y + MARKER) for x, y in centres]
    texts = [
        axis.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=7, color=colour)
        for x, y, text, colour in labels
    ]
    choices = []
    for text, centre in zip(texts, centres, strict=True):
        text.set_in_layout(False)  # a text at the edge would change the layout
        extent = text.get_window_extent()  # a little wider at a higher resolution
        choices.append(_candidate_boxes(centre, 1.08 * scale * extent.width, scale * extent.height))

    def cost(box: Box, rank: int, others: Sequence[Box]) -> float:
        outside = (box.right - box.left) * (box.top - box.bottom) - box.shared(frame)
        hidden = 3 * sum(map(box.shared, others)) + 2 * sum(map(box.shared, markers))
        return 30 * outside + hidden + 4 * sum(map(box.holds, drawn)) + rank / 4

    chosen: dict[int, int] = {}
    for _ in range(4):  # repeated, as the first labels do not know the later ones
        for index, boxes in enumerate(choices):
            others = [choices[other][rank] for other, rank in chosen.items() if other != index]
            costs = [cost(box, rank, others) for rank, box in enumerate(boxes)]
            chosen[index] = costs.index(min(costs))
    for index, text in enumerate(texts):
        reach, across, up = OFFSETS[chosen[index]]
        # Anchored at the side of the point, as the width of a text depends a little on the resolution.
        text.set(ha=("center", "left", "right")[across], va=("center", "bottom", "top")[up])
        text.xyann = (across * reach, up * reach)


def _candidate_boxes(centre: Point, width: float, height: float) -> list[Box]:
    """Return a box of that size at each offset from the centre."""
    boxes = []
    for reach, across, up in OFFSETS:
        x = centre[0] + across * (reach + width / 2)
        y = centre[1] + up * (reach + height / 2)
        boxes.append(Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2))
    return boxes


def _sample_line(corners: Sequence[Point]) -> list[Point]:
    """Sample points along a line, `STEP` apart."""
    points = []
    for (left, low), (right, high) in pairwise(corners):
        count = max(1, int(math.hypot(right - left, high - low) / STEP))
        points += [(left + (right - left) * k / count, low + (high - low) * k / count) for k in range(count)]
    return points

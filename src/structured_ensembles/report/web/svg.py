"""SVG elements as escaped markup: texts from files can neither add an element nor change an attribute."""

from __future__ import annotations

import math

from markupsafe import Markup

from structured_ensembles.common.tables import escape_control_characters
from structured_ensembles.report.style import STYLE, Style, choose_line

RADIUS = 4.0  # of a marker
COLOURS = [colour for colour, _ in STYLE.values()]  # page.css has a light and a dark variable for each
DASHES = {"-": "", "--": "6 3", "-.": "7 3 1.5 3", ":": "1.5 3"}
TURNED = {"^": 0.0, ">": 0.25, "v": 0.5, "<": 0.75}  # triangles: share of a full turn
CORNERS = {"p": 5, "h": 6, "H": 6, "8": 8}  # regular polygons


def element(tag: str, *children: Markup | str, **attributes: object) -> Markup:
    """Return an element; attributes in Python's spelling (`class_`, `stroke_width`), None left out."""
    shown = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), plain(value))
        for name, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(child if isinstance(child, Markup) else plain(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), shown, inner)


def plain(value: object) -> str:
    """Return a value as text: numbers with at most two decimals, control characters written out, line ends kept."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"
    return "\n".join(escape_control_characters(line) for line in str(value).split("\n"))


def colour_class(style: Style) -> str:
    """Return the CSS class of a style's colour; it sets `currentColor`."""
    return f"c{COLOURS.index(style[0])}"


def dashes(style: Style) -> str | None:
    """Return the dashes of a style's line; None where it is solid."""
    return DASHES[choose_line(style)] or None


def marker(kind: str, x: float, y: float, **attributes: object) -> Markup:
    """Return the marker of a style at (x, y), as a filled shape or a cross of lines."""
    if kind == "o":
        return element("circle", cx=x, cy=y, r=RADIUS, **attributes)
    return element("path", d=_marker_path(kind, x, y, RADIUS), **attributes)


def _marker_path(kind: str, x: float, y: float, radius: float) -> str:
    """Return the outline of a marker, by matplotlib's letter for it."""
    if kind in TURNED or kind in ("1", "2"):
        return _polygon(x, y, [1.2 * radius] * 3, TURNED.get(kind, 0.5 if kind == "1" else 0.0))
    if kind in CORNERS:
        return _polygon(x, y, [radius] * CORNERS[kind], 1 / 12 if kind == "H" else 0.0)
    if kind == "*":
        return _polygon(x, y, [1.3 * radius, 0.5 * radius] * 5)
    if kind in ("D", "d"):
        return _polygon(x, y, [1.2 * radius, (0.7 if kind == "d" else 1.2) * radius] * 2)
    if kind in ("P", "X"):  # a broad plus, upright or turned
        reach, arm = 1.25 * radius, 0.45 * radius
        corner = math.hypot(arm, arm)
        turn = 1 / 8 if kind == "X" else 0.0
        outer, spread = math.hypot(reach, arm), math.atan2(arm, reach) / math.tau
        points = []
        for quarter in range(4):
            middle = quarter / 4 + turn
            points += [(outer, middle - spread), (outer, middle + spread), (corner, middle + 1 / 8)]
        return _path([_around(x, y, reach, turn) for reach, turn in points])
    return _polygon(x, y, [1.2 * radius] * 4, 1 / 8)  # "s", and any other


def _polygon(x: float, y: float, reaches: list[float], turn: float = 0.0) -> str:
    return _path([_around(x, y, reach, turn + index / len(reaches)) for index, reach in enumerate(reaches)])


def _around(x: float, y: float, reach: float, turn: float) -> tuple[float, float]:
    """Return the point at a distance from (x, y); turn: 0 is above it, 1/4 to the right."""
    return x + reach * math.sin(math.tau * turn), y - reach * math.cos(math.tau * turn)


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points) + "Z"

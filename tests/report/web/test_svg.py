"""Colours of charts on pages: those of all other figures on white, and as easy to tell apart on black."""

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

from structured_ensembles.report.style import STYLE
from structured_ensembles.report.web.svg import colour_class, dashes
from tests.support.colours import EYES, lab, linear


def palettes() -> list[dict[str, str]]:
    """Return the colours of the style sheet by class, for the light and for the dark theme."""
    text = files("structured_ensembles.report.web").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = text.split("prefers-color-scheme: dark", 1)
    return [dict(re.findall(r"--(c\d+): (#[0-9a-f]{6})", theme)) for theme in (light, dark)]


def test_light_colours_are_those_of_all_figures() -> None:
    light, dark = palettes()
    assert {colour_class(style): style[0].lower() for style in STYLE.values()} == light
    assert light.keys() == dark.keys()


@pytest.mark.parametrize("eye", EYES)
def test_dark_colours_differ_in_colour_vision_deficiency(eye: str) -> None:
    seen = {name: lab(np.array(EYES[eye]) @ linear(colour)) for name, colour in palettes()[1].items()}
    for first, second in combinations(seen, 2):
        assert np.linalg.norm(seen[first] - seen[second]) > 15, (first, second)  # about 2 can just be noticed
    for name, colour in seen.items():
        assert colour[0] > 40, name  # lightness, on a ground of 8


def test_methods_are_solid_and_their_variants_dashed() -> None:
    assert dashes(STYLE["deep"]) is None
    assert dashes((STYLE["deep"][0], "")) is None
    assert dashes((STYLE["deep"][0], "p")) is not None

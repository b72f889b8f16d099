"""Charts of continual runs show every seed inside of their axes."""

import re
from xml.etree import ElementTree

import pytest

from structured_ensembles.continual import Memory
from structured_ensembles.report.web.continual_charts import chart_memory, chart_prune
from structured_ensembles.report.web.plots import BOTTOM, HEIGHT, TOP, Chart


def heights_of_whiskers(chart: Chart) -> list[float]:
    """Return both ends of all bars over seeds, in pixels from the top."""
    shapes = ElementTree.fromstring(chart.panels[0].svg).iter()
    outlines = [shape.get("d", "") for shape in shapes if shape.get("class") == "whisker"]
    return [float(point.split()[1]) for outline in outlines for point in re.split("[ML]", outline)[1:]]


def test_bars_over_seeds_stay_inside_the_axes() -> None:
    """Also a bar down to zero, and one much longer than the means are apart."""
    by_prune = chart_prune({0.3: [0.6, 0.8], 0.5: [0.71], 0.7: [0.0, 1.0]})
    by_memory = chart_memory({"naive": ([0.0, 0.9], Memory(100)), "structured": ([0.5, 0.6], Memory(100, masks=80))})
    for chart in (by_prune, by_memory):
        assert chart is not None
        heights = heights_of_whiskers(chart)
        assert len(heights) == 4
        assert all(TOP <= height <= HEIGHT - BOTTOM for height in heights)


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (("naive", "structured, prune=0.3"), ["naive", "structured"]),
        (("structured", "structured, prune=0.3"), ["structured", "structured, prune=0.3"]),
    ],
)
def test_points_of_one_method_have_their_settings_as_labels(labels: tuple[str, str], shown: list[str]) -> None:
    chart = chart_memory({labels[0]: ([0.5], Memory(100)), labels[1]: ([0.9], Memory(100, factors=1000))})
    assert chart is not None
    shapes = ElementTree.fromstring(chart.panels[0].svg).iter()
    assert [shape.text for shape in shapes if shape.get("class") == "label"] == shown

"""Figures of continual learning show the values they are given."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from structured_ensembles.continual import Capacity, Memory
from structured_ensembles.continual.figures import draw_capacity
from structured_ensembles.report.continual_figures import draw_accuracy_against_memory
from structured_ensembles.report.continual_pictures import collect_by_prune
from structured_ensembles.report.figures import as_svg
from structured_ensembles.runs.finished import Finished


def test_capacity_bars_stack_to_the_whole() -> None:
    figure = draw_capacity(
        Capacity((0, None, 2), {"backbone.a": 8, "backbone.b": 4}, {"backbone.a": (4, 2, 1), "backbone.b": (2, 1, 1)})
    )
    widths = [[bar.get_width() for bar in bars] for bars in figure.axes[0].containers]
    assert widths == [[50, 50], [25, 25], [12.5, 25], [12.5, 0]]  # three tasks and what is free
    shown = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert shown == ["task 0", "forgotten", "task 2", "free"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a (8)", "b (4)"]


def test_accuracy_against_memory_has_a_point_for_every_method() -> None:
    methods = {
        "naive": ([0.5, 0.7], Memory(100)),
        "single": ([0.9], Memory(100, factors=400, heads=10)),
        "structured": ([0.8, 0.9, 1.0], Memory(100, masks=80, stored_masks=40, heads=10)),
    }
    figure = draw_accuracy_against_memory(methods)
    points = _points(figure)
    assert points["naive"] == pytest.approx((0, 60))
    assert points["single"] == pytest.approx((1600, 90))
    assert points["structured"] == pytest.approx((5, 90))
    assert as_svg(figure).startswith("<svg")


def test_accuracy_by_prune_has_the_default_share_and_runs_that_differ_in_nothing_else() -> None:
    def run(accuracy: float, **settings: Any) -> Finished:
        resolved = {"method_arguments": {"prune": 0.5, "extraction": "hard"} | settings}
        config = {"method": "structured", "method_arguments": settings}
        return Finished(Path(), config, {"resolved": resolved}, {"cl/accuracy": accuracy})

    runs = {
        "prune=0.3": [run(0.6, prune=0.3), run(0.7, prune=0.3)],
        "default": [run(0.8)],
        "prune=0.7": [run(0.9, prune=0.7)],
        "soft": [run(0.1, extraction="soft")],
    }
    assert collect_by_prune(runs) == {0.3: [0.6, 0.7], 0.5: [0.8], 0.7: [0.9]}
    assert collect_by_prune({}) == {}


def _points(figure: Figure) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.xy for text in figure.axes[0].texts}

"""The front of memory against accuracy and calibration, and the placement of its labels."""

import math

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from structured_ensembles.report.figures import as_svg
from structured_ensembles.report.front import FrontPoint, draw_front
from structured_ensembles.report.labels import Label, place_labels
from structured_ensembles.report.style import STYLE


def test_points_lie_at_their_values() -> None:
    figure = draw_front(
        [
            FrontPoint("structured", "p=0.5", 1.6, [0.93, 0.93, 0.96], [0.2, 0.24], [0.01, 0.03]),
            FrontPoint("single", "", 1.0, [0.9], [0.3], [0.05]),
            FrontPoint("structured", "p=0.9", 0.25, [0.9, 0.92], [0.3, 0.28], []),
            FrontPoint("structured", "p=0.8", 0.5, [0.91], [math.nan], [0.02]),
        ],
        memory="bytes",
    )
    accuracy, nll, ece = figure.axes
    assert line_of(accuracy, "structured") == ([0.25, 0.5, 1.6], pytest.approx([91, 91, 94]))
    assert line_of(nll, "structured") == ([0.25, 1.6], pytest.approx([0.29, 0.22]))
    assert line_of(ece, "structured") == ([0.5, 1.6], pytest.approx([2, 2]))
    assert line_of(ece, "single") == ([1], [pytest.approx(5)])
    (bars,) = accuracy.collections
    assert [list(segment[:, 1]) for segment in bars.get_segments()] == [
        pytest.approx([90, 92]),
        pytest.approx([91, 91]),
        pytest.approx([93, 96]),  # not symmetric about the mean, 94
    ]
    assert [axis.get_title() for axis in figure.axes] == ["accuracy (%)", "NLL (nats)", "ECE (%)"]
    for axis in figure.axes:
        assert axis.get_xscale() == "log"
        assert axis.get_xlabel() == "bytes, in networks"
        low, high = axis.get_xlim()
        assert low < 0.25
        assert high > 1.6
    handle = accuracy.get_legend_handles_labels()[0][0][0]
    assert (handle.get_color(), handle.get_marker()) == STYLE["structured"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["structured", "single"]
    labels = {text.get_text(): text.xy for text in accuracy.texts if text.get_text()}
    assert labels == {"p=0.5": pytest.approx((1.6, 94)), "p=0.9": pytest.approx((0.25, 91)), "p=0.8": (0.5, 91)}


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ([1], ["0.8", "0.9", "1", "1.1", "1.2", "1.3"]),
        ([0.25, 10], ["0.2", "0.5", "1", "2", "5", "10"]),
        ([0.01, 100], ["0.01", "0.1", "1", "10", "100"]),
    ],
)
def test_memory_axis_has_plain_numbers_and_marks_one_network(sizes: list[float], ticks: list[str]) -> None:
    figure = draw_front([FrontPoint("deep", "", size, [0.9], [0.3], [0.02]) for size in sizes])
    axis = figure.axes[0]
    low, high = axis.get_xlim()
    assert low < min(sizes)
    assert high > max(sizes)
    shown = zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
    assert [label.get_text() for tick, label in shown if low < tick < high * 1.0001] == ticks
    assert any(list(line.get_xdata()) == [1, 1] for line in axis.lines)


def test_panel_without_values_has_a_note() -> None:
    figure = draw_front([FrontPoint("deep", "N=3", 3, [0.9], [], [math.nan])])
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [["N=3"], ["not known"], ["not known"]]
    with pytest.raises(ValueError, match="points must hold a value to draw"):
        draw_front([])
    with pytest.raises(ValueError, match="points must hold a value to draw"):
        draw_front([FrontPoint("deep", "N=3", 3, [], [], [])])
    with pytest.raises(ValueError, match="memory of deep N=3 is 0; it must be a positive number"):
        FrontPoint("deep", "N=3", 0, [0.9], [0.3], [0.02])


def test_labels_of_a_front_do_not_overlap() -> None:
    points = [FrontPoint("single", "", 1, [0.915, 0.917], [0.29, 0.3], [0.043, 0.044])]
    for members in (2, 3, 5, 10):
        gain = math.log(members)
        values = [0.937 + 0.01 * gain], [0.21 - 0.04 * gain], [0.016 - 0.003 * gain]
        points.append(FrontPoint("deep", f"N={members}", members, *values))
    for prune, size in ((0.9, 0.25), (0.8, 0.6), (0.5, 1.6)):
        gain = math.log(size)
        values = [0.93 + 0.005 * gain], [0.22 - 0.02 * gain], [0.013 - 0.001 * gain]
        points.append(FrontPoint("structured", f"p={prune}", size, *values))
    figure = draw_front(points)
    assert as_svg(figure) == as_svg(draw_front(points))
    figure.draw_without_rendering()
    for axis in figure.axes:
        boxes = [text.get_window_extent() for text in axis.texts if text.get_text()]
        assert len(boxes) == 7
        assert not any(box.overlaps(other) for index, box in enumerate(boxes) for other in boxes[:index])
        frame = axis.get_window_extent()
        for box in boxes:
            assert frame.x0 <= box.x0 <= box.x1 <= frame.x1
            assert frame.y0 <= box.y0 <= box.y1 <= frame.y1
            for text in axis.texts:
                assert not box.contains(*axis.transData.transform(text.xy))


def test_labels_avoid_each_other() -> None:
    """A label is right of its point if there is room, else away from lines, labels and the frame."""
    right = placed([Label(5, 5, "one")])[0]
    assert right.xyann[0] > 0
    assert right.xyann[1] == 0
    assert placed([Label(5, 5, "one")], [[(5, 5), (9, 5)]])[0].xyann[0] <= 0
    assert placed([Label(9.9, 5, "one")])[0].xyann[0] < 0
    assert placed([Label(5, 5, "one"), Label(5.6, 5, "")])[0].xyann != right.xyann  # a point without a label
    # Between these two is room for one label alone, and beyond the second the frame ends.
    first, second = placed([Label(7, 5, "first label"), Label(9.9, 5, "second label")])
    assert not first.get_window_extent().overlaps(second.get_window_extent())
    assert (first.get_text(), second.get_text()) == ("first label", "second label")


def placed(labels: list[Label], lines: list[list[tuple[float, float]]] | None = None) -> list[Annotation]:
    figure = Figure(figsize=(4, 4))
    axis = figure.subplots()
    axis.set(xlim=(0, 10), ylim=(0, 10))
    place_labels(axis, labels, lines or [])
    return axis.texts


def line_of(axis: Axes, name: str) -> tuple[list[float], list[float]]:
    handles, names = axis.get_legend_handles_labels()
    line = handles[names.index(name)][0]
    return list(line.get_xdata()), list(line.get_ydata())

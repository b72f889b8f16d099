"""Figures of runs show the values they are given."""

import math

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from structured_ensembles.evaluation.discarding import discarding_curve
from structured_ensembles.methods import METHODS
from structured_ensembles.report.figures import as_svg
from structured_ensembles.report.run_figures import (
    draw_corruption_curves,
    draw_disagreement,
    draw_discarding_curves,
    draw_entropy_histograms,
    draw_learning_curves,
    draw_overheads,
)
from structured_ensembles.report.style import STYLE, wrap_name

LONG = "structured ensemble of five members with the modern recipe, p=0.8, stored as int8"


def test_bar_lengths_are_the_means() -> None:
    figure = draw_overheads({"deep": [5.0], "structured": [0.9, 1.0, 1.4], "narrow": [], "tiny": [0.034, math.nan]})
    (axis,) = figure.axes
    bars = {round(bar.get_y() + bar.get_height() / 2): bar for bar in axis.patches}
    assert {row: bar.get_width() for row, bar in bars.items()} == pytest.approx({0: 5, 1: 1.1, 3: 0.034})
    assert to_hex(bars[1].get_facecolor()) == STYLE["structured"][0].lower()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["deep", "structured", "narrow", "tiny"]
    assert axis.get_ylim()[0] > axis.get_ylim()[1]  # the first on top
    texts = {text.get_text(): text.xy for text in axis.texts}
    assert texts["5.00"] == (5, 0)
    assert texts["1.10"] == (1.4, 1)  # beyond the range of the seeds
    assert texts["not known"] == (0, 2)
    assert texts["0.034"] == (0.034, 3)
    assert texts["one network"][0] == 1
    (ranges,) = [line.get_segments()[0] for line in axis.collections]  # of the only method with several values
    assert ranges[:, 0] == pytest.approx([0.9, 1.4])
    assert axis.get_xlim() == pytest.approx((0, 5.75))
    (line,) = [line for line in axis.lines if line.get_linestyle() == ":"]
    assert list(line.get_xdata()) == [1, 1]
    assert draw_overheads({"structured": [0.2]}).axes[0].get_xlim()[1] > 1  # or the line would not be seen


def test_histograms_share_bins_and_integrate_to_one() -> None:
    entropies = {"right": torch.rand(400) ** 3, "wrong": 1.5 + torch.rand(30), "corrupted": 2 * torch.rand(200)}
    entropies["right"][0] = math.nan
    figure = draw_entropy_histograms(entropies, threshold=0.4)
    outlines = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    edges = outlines[0].get_data().edges
    assert edges[0] == 0
    assert edges[-1] == pytest.approx(float(entropies["wrong"].max()))
    for outline, values in zip(outlines, entropies.values(), strict=True):
        known = values[values.isfinite()].double()
        density, outline_edges, _ = outline.get_data()
        assert (outline_edges == edges).all()
        assert (density * np.diff(edges)).sum() == pytest.approx(1)
        counts = [
            int(((known >= low) & (known < high)).sum()) for low, high in zip(edges[:-2], edges[1:-1], strict=True)
        ]
        assert density[:-1] == pytest.approx(np.array(counts) / len(known) / (edges[1] - edges[0]))
    assert len({(to_hex(patch.get_edgecolor()), patch.get_linestyle()) for patch in outlines}) == 3
    assert shown(figure) == ["right (399)", "wrong (30)", "corrupted (200)", "discard above"]
    assert list(figure.axes[0].lines[0].get_xdata()) == [0.4, 0.4]


def test_histogram_limits_include_the_threshold() -> None:
    kinds = {name: torch.rand(50) for name in ("right", "wrong", "corrupted", "SVHN", "noise")}
    figure = draw_entropy_histograms({**kinds, "none": torch.zeros(0)}, threshold=3.0)
    assert len(figure.axes[0].patches) == 5  # outlines only, and none for the empty kind
    assert len({to_hex(patch.get_edgecolor()) for patch in figure.axes[0].patches}) == 5
    assert figure.axes[0].get_xlim()[1] > 3
    certain = draw_entropy_histograms({"right": torch.zeros(9)}, None)
    assert shown(certain) == ["right (9)"]
    assert certain.axes[0].patches[-1].get_data().values[0] > 0


def test_discarding_curves_pass_through_the_accuracies() -> None:
    entropy, correct = torch.rand(5000), torch.rand(5000) < 0.8
    figure = draw_discarding_curves({"deep": discarding_curve(entropy, correct), "structured": (t(0, 0.5), t(0.8, 1))})
    line, short = figure.axes[0].lines
    assert 2 < len(line.get_xdata()) <= 200
    for discarded, accuracy in zip(line.get_xdata()[::20], line.get_ydata()[::20], strict=True):
        kept = correct[entropy.argsort()[: round(5000 * (1 - discarded / 100))]]
        assert accuracy == pytest.approx(100 * float(kept.double().mean()))
    assert line.get_xdata()[0] == pytest.approx(0)
    assert line.get_xdata()[-1] == pytest.approx(100 * 4999 / 5000)  # the surest alone
    assert (list(short.get_xdata()), list(short.get_ydata())) == ([0, 50], [80, 100])
    assert (short.get_color(), short.get_marker()) == STYLE["structured"]
    assert shown(figure) == ["deep", "structured"]


def test_last_samples_do_not_set_the_limits_of_discarding_curves() -> None:
    figure = draw_discarding_curves({"deep": (t(0, 0.5, 0.9, 0.999), t(0.9, 0.95, 0.98, 0.0))})
    low, high = figure.axes[0].get_ylim()
    assert 88 < low < 90
    assert 98 < high < 100
    assert figure.axes[0].get_xlim() == (0, 100)
    with pytest.raises(ValueError, match=r"two tensors of one shape \(n,\), not \(2,\), \(3,\)"):
        draw_discarding_curves({"deep": (t(0, 1), t(0, 1, 1))})


def test_disagreement_is_shown_in_percent() -> None:
    matrix = torch.tensor([[0, 0.12, 0.05], [0.12, 0, 0.071], [0.05, 0.071, 0]])
    figure = draw_disagreement(matrix, "deep ensemble")
    (axis,) = figure.axes
    assert {text.get_position(): text.get_text() for text in axis.texts} == {
        (column, row): f"{100 * float(matrix[row, column]):.1f}" for row in range(3) for column in range(3)
    }
    (picture,) = axis.images
    assert np.asarray(picture.get_array()) == pytest.approx(100 * matrix.numpy())
    assert picture.get_clim() == pytest.approx((0, 12))
    assert [text.get_color() for text in axis.texts][:3] == ["black", "white", "black"]  # dark where there is much
    assert axis.get_title() == "deep ensemble"
    assert [text.get_text() for text in draw_disagreement(torch.zeros(1, 1)).axes[0].texts] == ["0.0"]
    with pytest.raises(ValueError, match=r"matrix must have the shape \(members, members\), not \(2, 3\)"):
        draw_disagreement(torch.zeros(2, 3))


def test_corruption_curves_show_means_and_ranges() -> None:
    figure = draw_corruption_curves(
        {"single": {5: [0.4], 0: [0.9], 3: []}, "structured": {0: [0.9, 0.94], 1: [0.8, 0.9], 2: [0.7, math.nan]}}
    )
    (axis,) = figure.axes
    assert line_of(axis, "single") == ([0, 5], pytest.approx([90, 40]))
    assert line_of(axis, "structured") == ([0, 1, 2], pytest.approx([92, 85, 70]))
    (bars,) = axis.collections  # the single network has one seed
    assert [list(segment[:, 1]) for segment in bars.get_segments()] == [
        pytest.approx([90, 94]),
        pytest.approx([80, 90]),
        pytest.approx([70, 70]),
    ]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["clean", "1", "2", "3", "4", "5"]
    assert shown(figure) == ["single", "structured"]
    assert figure.legends[0].get_title().get_text() == "mean and range over seeds"
    one_seed = draw_corruption_curves({"single": {0: [0.9], 1: [0.8]}})
    assert not one_seed.axes[0].collections
    assert one_seed.legends[0].get_title().get_text() == ""


def test_variants_of_a_method_have_distinct_lines() -> None:
    names = ["structured", "structured, scope=network", "structured, scope=network, rescale=True", "deep"]
    figure = draw_corruption_curves({name: {0: [0.9], 3: [0.5]} for name in names})
    lines = {container.get_label(): container.lines[0] for container in figure.axes[0].containers}
    drawn = {name: (lines[wrap_name(name)].get_linestyle(), lines[wrap_name(name)].get_color()) for name in names}
    assert drawn["structured"][0] == drawn["deep"][0] == "-"
    assert len(set(drawn.values())) == 4
    assert len({colour for _, colour in drawn.values()}) == 2


def test_learning_curves_show_every_member() -> None:
    rows = [
        {"epoch": epoch, "member": member, "loss": 2.0 / (1 + epoch) + member, "validation_accuracy": accuracy}
        for epoch, accuracy in enumerate([0.5, None, 0.75])
        for member in (0, 1)
    ]
    rows[3]["loss"] = math.nan  # member 1, epoch 1
    figure = draw_learning_curves(rows)
    loss, accuracy = figure.axes
    assert line_of(loss, "member 0") == ([0, 1, 2], pytest.approx([2, 1, 2 / 3]))
    assert line_of(loss, "member 1") == ([0, 2], pytest.approx([3, 5 / 3]))
    assert line_of(accuracy, "member 0") == ([0, 2], [50, 75])
    assert loss.get_ylabel() == "training loss"
    assert accuracy.get_ylabel() == "validation accuracy (%)"
    assert len({(line.get_color(), line.get_linestyle()) for line in loss.lines}) == 2
    assert shown(figure) == ["member 0", "member 1"]


def test_learning_curves_work_without_validation_and_for_one_epoch() -> None:
    figure = draw_learning_curves([{"epoch": 0, "member": 0, "loss": 2.0, "validation_accuracy": None}])
    (axis,) = figure.axes
    assert line_of(axis, "member 0") == ([0], [2])
    assert axis.lines[0].get_marker() not in ("", "None")  # or one point would not be seen
    figure.draw_without_rendering()
    assert [tick for tick in axis.get_xticks() if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]] == [0]


@pytest.mark.parametrize(
    ("draw", "argument"),
    [
        (lambda: draw_overheads({}), "overheads"),
        (lambda: draw_overheads({"deep": [math.nan]}), "overheads"),
        (lambda: draw_entropy_histograms({}, None), "entropies"),
        (lambda: draw_entropy_histograms({"right": torch.zeros(0)}, 1.0), "entropies"),
        (lambda: draw_discarding_curves({}), "curves"),
        (lambda: draw_corruption_curves({}), "curves"),
        (lambda: draw_corruption_curves({"deep": {0: []}}), "curves"),
        (lambda: draw_learning_curves([]), "rows"),
        (lambda: draw_learning_curves([{"epoch": 0, "member": 0, "loss": None}]), "rows"),
    ],
)
def test_empty_values_are_an_error(draw, argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} must hold a value to draw"):
        draw()


@pytest.mark.parametrize("names", [["structured"], list(METHODS), [LONG, LONG + " again"]], ids=["one", "nine", "long"])
def test_figures_are_not_clipped_and_are_deterministic(names: list[str]) -> None:
    def draw() -> list[Figure]:
        return [
            draw_overheads({name: [1.0, 1 + index] for index, name in enumerate(names)}),
            draw_entropy_histograms({name: torch.linspace(0, 1 + index, 50) for index, name in enumerate(names)}, 0.5),
            draw_discarding_curves({name: (t(0, 0.4, 0.9), t(0.8, 0.9, 1)) for name in names}),
            draw_corruption_curves({name: {0: [0.9, 0.92], 5: [0.4, 0.5]} for name in names}),
        ]

    for figure, again in zip(draw(), draw(), strict=True):
        assert as_svg(figure) == as_svg(again)
        tight_box, inches = figure.get_tightbbox(), figure.get_size_inches()
        assert tight_box.x0 >= 0
        assert tight_box.y0 >= 0
        assert tight_box.x1 <= inches[0]
        assert tight_box.y1 <= inches[1]
        (axis,) = figure.axes
        size = axis.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        assert size.width > 2.5  # long names do not squeeze the picture
        assert size.height > (2.5 if figure.legends else 0.25 * len(names))  # nor do their legends


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shown(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def line_of(axis: Axes, name: str) -> tuple[list[float], list[float]]:
    """Return the data of the curve with this label."""
    handles, labels = axis.get_legend_handles_labels()
    line = handles[labels.index(name)]
    line = line[0] if isinstance(line, tuple) else line  # an error bar comes with its caps
    return list(line.get_xdata()), list(line.get_ydata())

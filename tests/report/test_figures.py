"""Reliability diagrams, the style of every method, and figures as files."""

from itertools import combinations

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve

from structured_ensembles.methods import METHODS
from structured_ensembles.report.figures import (
    as_svg,
    draw_reliability_of_confidence,
)
from structured_ensembles.report.style import STYLE, choose_styles
from tests.support.colours import EYES, lab, linear


@pytest.mark.parametrize("eye", EYES)
def test_method_styles_differ_in_colour_vision_deficiency_and_grey(eye: str) -> None:
    assert set(STYLE) == set(METHODS)
    assert len({marker for _, marker in STYLE.values()}) == len(STYLE)
    seen = {name: lab(np.array(EYES[eye]) @ linear(colour)) for name, (colour, _) in STYLE.items()}
    for first, second in combinations(seen, 2):
        assert np.linalg.norm(seen[first] - seen[second]) > 15, (first, second)  # about 2 can just be noticed
    for name, colour in seen.items():
        assert colour[0] < 80, name  # lightness; thin lines of Okabe and Ito's yellow (90) are lost on white


def test_names_have_the_style_of_their_method_and_no_two_are_equal() -> None:
    names = ["deep ensemble of 5", "structured, p=0.5", "structured", "deeper", "one network", "mc_dropout"]
    styles = choose_styles(names)
    assert list(styles) == names
    assert styles["structured"] == STYLE["structured"]
    assert styles["deep ensemble of 5"] == STYLE["deep"]
    assert styles["mc_dropout"] == STYLE["mc-dropout"]
    assert len(set(styles.values())) == len(names)
    others = {styles[name] for name in ("structured, p=0.5", "deeper", "one network")}
    assert not others & set(STYLE.values())
    assert styles["structured, p=0.5"][0] == styles["structured"][0]  # a variant has the method's colour
    assert len({colour for colour, _ in styles.values()}) == len(names) - 1  # while there are colours left
    many = choose_styles([*METHODS, *(f"other {index}" for index in range(40))])
    assert len(set(many.values())) == len(METHODS) + 40
    assert choose_styles(["deep", "structured"])["structured"] == choose_styles(["structured"])["structured"]


def test_reliability_equals_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    curves = []
    for name in METHODS:
        confidence = torch.rand(2000, generator=generator).double()
        curves.append((name, confidence, torch.rand(2000, generator=generator) < confidence**2))
    axis = draw_reliability_of_confidence(curves, bins=8).axes[0]
    drawn = {line.get_label(): line for line in axis.lines}
    assert list(drawn) == ["perfect", *METHODS]
    for name, confidence, correct in curves:
        accuracy, mean = calibration_curve(correct.numpy(), confidence.numpy(), n_bins=8)
        assert drawn[name].get_xdata() == pytest.approx(mean)
        assert drawn[name].get_ydata() == pytest.approx(accuracy)
        assert (drawn[name].get_color(), drawn[name].get_marker()) == STYLE[name]


def test_reliability_skips_bins_of_fewer_than_five() -> None:
    confidence = torch.tensor([0.55] * 5 + [0.95] * 4)
    correct = torch.tensor([True, True, True, False, False] + [True] * 4)
    figure = draw_reliability_of_confidence([("deep", confidence, correct), ("single", confidence[5:], correct[5:])])
    _, line, empty = figure.axes[0].lines
    assert line.get_xydata() == pytest.approx(np.array([[0.55, 0.6]]))
    assert len(empty.get_xydata()) == 0
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["perfect", "deep", "single (too few samples)"]
    assert as_svg(figure).startswith("<svg")
    with pytest.raises(ValueError, match="curves must hold a value to draw"):
        draw_reliability_of_confidence([])

"""Every figure of docs/concepts has the script that draws it, a page, and is what the script draws."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
NAMES = sorted(path.stem.removeprefix("concept-") for path in (DOCS / "images").glob("concept-*.png"))
# Mean difference of pixels. Where a network is trained, another processor rounds otherwise, and another digit may be
# the one that members disagree on: then only the layout is compared.
MAX_DIFFERENCE = {"trace": 0.004, "extraction": 0.004, "diversity": 0.004}
MAX_AFTER_TRAINING = 0.1
QUICK = [name for name in NAMES if name != "continual"]  # five tasks take as long as all others together


@pytest.fixture
def style() -> Iterator[ModuleType]:
    """Import docs/figures/style.py as the scripts do."""
    sys.path.insert(0, str(DOCS / "figures"))
    try:
        yield importlib.import_module("style")
    finally:
        sys.path.remove(str(DOCS / "figures"))
        sys.modules.pop("style", None)


def load_script(name: str) -> ModuleType:
    """Import the script of a figure, without running its main part."""
    spec = importlib.util.spec_from_file_location(f"concept_{name}", DOCS / "figures" / f"concept_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pixels_on_white(path: Path) -> np.ndarray:
    """Read a picture as floats in [0,1], (height, width, 3), on a white background."""
    picture = Image.open(path).convert("RGBA")
    background = Image.new("RGBA", picture.size, "white")
    background.alpha_composite(picture)
    return np.asarray(background.convert("RGB"), dtype=float) / 255


def test_every_figure_has_a_script_and_a_page() -> None:
    scripts = {path.stem.removeprefix("concept_") for path in (DOCS / "figures").glob("concept_*.py")}
    assert scripts == set(NAMES)
    assert len(NAMES) == 10
    for name in NAMES:
        assert f"../images/concept-{name}.png" in (DOCS / "concepts" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", QUICK)
def test_the_committed_figure_is_what_its_script_draws(name: str, style: ModuleType, tmp_path: Path) -> None:
    style.save(load_script(name).draw, tmp_path / "drawn.png")
    committed, drawn = (
        pixels_on_white(path) for path in (DOCS / "images" / f"concept-{name}.png", tmp_path / "drawn.png")
    )
    assert committed.shape == drawn.shape
    assert np.abs(committed - drawn).mean() < MAX_DIFFERENCE.get(name, MAX_AFTER_TRAINING)
    assert (drawn < 0.9).any(-1).mean() > 0.02  # something is drawn

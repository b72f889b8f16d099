"""Style of the figures of docs/concepts: legible on white and on dark pages, since the background is transparent.

Every script beside this one draws the figure of one page; `python docs/figures/concept_trace.py` writes
docs/images/concept-trace.png. To draw all: `for script in docs/figures/concept_*.py; do python $script; done`.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import structured_ensembles as se

INK = "#7b828c"  # text and axes: a contrast of at least 3.8 to white and to furo's dark background
FAINT = "#8b929c40"  # grids and empty cells
BLUE, ORANGE, GREEN, ROSE, VIOLET = "#3a87d6", "#d9690f", "#1e9a72", "#cc5f94", "#8a6bd8"
SERIES = (BLUE, ORANGE, GREEN, ROSE, VIOLET)
SHADES = mpl.colors.LinearSegmentedColormap.from_list("shades", ["#8b929c30", BLUE])  # faint to blue
DIVERGING = mpl.colors.LinearSegmentedColormap.from_list("signed", [ORANGE, "#8b929c30", BLUE])  # below and above 0
DPI = 160
IMAGES = Path(__file__).parent.parent / "images"
SETTINGS = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
}


def run(script: str, draw: Callable[[], Figure]) -> Path:
    """Draw the figure of a script, concept_NAME.py, and write docs/images/concept-NAME.png."""
    path = IMAGES / f"{Path(script).stem.replace('_', '-')}.png"
    save(draw, path)
    print(path)
    return path


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw a figure in this style, on one thread so that it is the same every time, and write it as PNG."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mpl.rc_context(SETTINGS):
            draw().savefig(path, dpi=DPI, metadata={"Software": None})
    finally:
        torch.set_num_threads(threads)


def show_cells(axis: Axes, values: Tensor, **options: object) -> None:
    """Draw a matrix (rows, columns) as cells, without ticks and frame."""
    axis.imshow(values.numpy(), **{"aspect": "auto", "interpolation": "none", **options})
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def trained_ensemble(members: int = 4, epochs: int = 12, hidden: int = 64) -> tuple[se.Ensemble, se.Data]:
    """Train halves of a small network on the digits; return the ensemble and the data."""
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.mlp(64, hidden=(hidden, hidden))
    recipe = se.Recipe.named("modern", epochs=epochs, rate=0.05)
    return se.structured_ensemble(model, data, members=members, recipe=recipe, search_epochs=2, quiet=True), data

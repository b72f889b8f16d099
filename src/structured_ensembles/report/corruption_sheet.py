"""Contact sheet of the corruptions at every severity."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

import torch
from matplotlib.figure import Figure
from torch import Tensor

from structured_ensembles.evaluation.corruptions import CORRUPTIONS, ORIGIN, SEVERITIES, corrupt

GAP = 1 / 16  # of an image
LABELS, HEADER, FOOTER = 1.5, 0.3, 0.6  # inches


def draw_corruption_sheet(image: Tensor, names: Sequence[str] = tuple(CORRUPTIONS), seed: int = 0) -> Figure:
    """Draw a row per corruption and a column per severity, the original first; below, their origin.

    image: (1 or 3 channels, height, width), pixels as floats in [0,1].
    """
    rows = [[image, *(corrupt(image[None], name, severity, seed)[0] for severity in SEVERITIES)] for name in names]
    height, width = image.shape[-2:]
    cell_height, cell_width = height + max(1, round(GAP * height)), width + max(1, round(GAP * width))
    sheet = torch.ones(len(rows) * cell_height, len(rows[0]) * cell_width, 3)
    for row, images in enumerate(rows):
        for column, corrupted in enumerate(images):
            cell = sheet[
                row * cell_height : row * cell_height + height, column * cell_width : column * cell_width + width
            ]
            cell.copy_(corrupted.expand(3, -1, -1).permute(1, 2, 0))
    # An inch per image.
    images_height, total_width = len(rows) * cell_height / cell_width, len(rows[0]) + LABELS
    total_height = HEADER + images_height + FOOTER
    figure = Figure(figsize=(total_width, total_height))
    axis = figure.add_axes(
        (LABELS / total_width, FOOTER / total_height, len(rows[0]) / total_width, images_height / total_height)
    )
    figure.text(0.1 / total_width, 0.1 / total_height, "\n".join(wrap(ORIGIN, 115)), fontsize=8, va="bottom")
    axis.imshow(sheet.cpu().numpy(), interpolation="nearest", aspect="equal")
    axis.set_anchor("W")
    axis.set_xticks(
        [column * cell_width + width / 2 for column in range(len(rows[0]))],
        ["original", *map(str, SEVERITIES)],
        fontsize=9,
    )
    axis.set_yticks(
        [row * cell_height + height / 2 for row in range(len(rows))],
        [name.replace("_", " ") for name in names],
        fontsize=9,
    )
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure

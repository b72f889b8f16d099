"""Draw docs/images/concept-trace.png: the axes of every tensor of a small network, coloured by channel group."""

import style
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

import structured_ensembles as se

CELL = 0.13  # inches per channel
DROPPED = 2
SHOWN = (
    *("conv1.weight", "conv1.bias", "norm.weight", "norm.running_mean"),  # bias and variance of the norm likewise
    *("conv2.weight", "conv2.bias", "fc.weight", "fc.bias"),
)


class Net(nn.Module):
    """Two convolutions with a norm between them, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 9, 3, padding=1)
        self.fc = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 1, height, width) to logits (batch, 5)."""
        x = self.conv2(self.norm(self.conv1(x)).relu()).relu()
        return self.fc(x.mean((2, 3)))


def draw() -> Figure:
    """Draw a rectangle per tensor: rows are its first axis, columns its second, coloured where a group indexes them."""
    graph = se.trace(Net(), torch.zeros(2, 1, 8, 8))
    colours = dict(zip(graph.prunable, style.SERIES, strict=False))
    dropped_group = next(iter(colours))
    figure = Figure(figsize=(9.6, 2.9))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 9.6), ylim=(2.9, 0))
    axis.axis("off")
    left = 0.35
    for name in SHOWN:
        groups = [spans[0].group for spans in graph.axes[name][:2]]  # None where no prunable group indexes the axis
        sizes = [sum(span.size * span.block for span in spans) for spans in graph.axes[name][:2]]
        rows, columns = sizes[0], sizes[1] if len(sizes) > 1 else 1
        width, height, top = columns * CELL, rows * CELL, 0.75
        axis.add_patch(Rectangle((left, top), width, height, facecolor=style.FAINT, edgecolor="none"))
        if groups[0] in colours:
            axis.add_patch(Rectangle((left - 0.1, top), 0.07, height, color=colours[groups[0]]))
            if groups[0] == dropped_group:
                axis.add_patch(Rectangle((left, top + DROPPED * CELL), width, CELL, color=style.BLUE))
        if len(groups) > 1 and groups[1] in colours:
            axis.add_patch(Rectangle((left, top - 0.1), width, 0.07, color=colours[groups[1]]))
            if groups[1] == dropped_group:
                axis.add_patch(Rectangle((left + DROPPED * CELL, top), CELL, height, color=style.BLUE))
        axis.text(left - 0.1, top - 0.2, name.replace(".", ".\n"), va="bottom", fontsize=9.5)
        left += max(width, 0.06 * len(name)) + 0.4
    for number, (name, colour) in enumerate(colours.items()):
        text = f"group {name}, {graph.prunable[name]} channels"
        axis.add_patch(Rectangle((0.25 + 2.6 * number, 2.3), 0.22, 0.12, color=colour))
        axis.text(0.55 + 2.6 * number, 2.41, text)
    fixed = [group for group in graph.groups if not group.prunable]
    axis.text(5.5, 2.41, "; ".join(f"{group.name}: fixed, {group.reason}" for group in fixed))
    what = (
        f"Without channel {DROPPED} of {dropped_group}, the blue entries go: a row, entries of bias and norm, a column."
    )
    axis.text(0.25, 2.72, what)
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)

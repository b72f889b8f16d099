"""Draw docs/images/concept-scales.png: scaling vectors before and after the search, and its loss."""

import math

import style
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr

import structured_ensembles as se

MEMBERS = 3


def draw() -> Figure:
    """Draw where every scale began and ended, and the validation loss of the search beside a uniform guess."""
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.lenet5()
    graph = se.trace(model, data.example())
    before = se.Scales.draw(graph, MEMBERS)
    after = se.learn_scales(model, graph, data, members=MEMBERS, epochs=10, quiet=True)

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    starts, ends = (torch.cat([vector.flatten() for vector in scales.vectors.values()]) for scales in (before, after))
    for member in range(MEMBERS):
        own = [torch.cat([vector[member] for vector in scales.vectors.values()]) for scales in (before, after)]
        left.scatter(*own, s=9, color=style.SERIES[member], label=f"member {member}", linewidths=0)
    left.plot([-3, 3], [-3, 3], color=style.INK, linewidth=1, linestyle=":")
    left.set(xlabel="scale as drawn from N(0,1)", ylabel="scale after 10 epochs")
    left.set_title(f"{len(starts)} scales, rank correlation {spearmanr(starts, ends).statistic:.3f}", loc="left")
    left.legend(markerscale=2)

    epochs = [row["epoch"] + 1 for row in after.history]
    right.plot(epochs, [row["validation_loss"] for row in after.history], color=style.BLUE, marker="o")
    right.axhline(math.log(data.num_classes), color=style.ORANGE, linestyle="--")
    right.text(epochs[-1], math.log(data.num_classes), "a uniform guess", ha="right", va="bottom", color=style.ORANGE)
    right.set(xlabel="epoch of the search", ylabel="validation loss", xticks=epochs[::3])
    right.set_title("loss of the frozen network under the scales", loc="left")
    right.grid(axis="y")
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)

"""Draw docs/images/concept-saliency.png: the saliency of a layer's neurons for each member, and their scales."""

import style
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr

import structured_ensembles as se

MEMBERS, GROUP = 4, "fc1"


def draw() -> Figure:
    """Draw a row of saliencies per member, and saliency against the absolute value of the scale."""
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.lenet5()
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=MEMBERS, epochs=3, quiet=True)
    scores = se.saliency(model, graph, scales, data, quiet=True)
    values = torch.stack([score.values[GROUP] for score in scores])

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    relative = values / values.amax(1, keepdim=True)
    style.show_cells(left, relative.sqrt(), cmap=style.SHADES, vmin=0, vmax=1)
    left.set_yticks(range(MEMBERS), [f"member {member}" for member in range(MEMBERS)])
    left.tick_params(length=0)
    left.set_xlabel(f"the {values.shape[1]} neurons of {GROUP}")
    left.set_title("saliency: faint is 0, blue the member's largest", loc="left")

    sizes = scales.vectors[GROUP].abs()
    for member in range(MEMBERS):
        right.scatter(sizes[member], values[member], s=10, color=style.SERIES[member], linewidths=0)
    right.set(xlabel="absolute value of the scale", ylabel="saliency", yscale="log", ylim=(1e-6, None))
    correlation = spearmanr(sizes.flatten(), values.flatten()).statistic
    right.set_title(f"rank correlation {correlation:.2f}", loc="left")
    right.grid()
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)

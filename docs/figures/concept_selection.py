"""Draw docs/images/concept-selection.png: the neurons that four members keep of one layer, by each selection."""

import itertools
import statistics

import style
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import structured_ensembles as se

MEMBERS, GROUP = 4, "fc1"


def draw() -> Figure:
    """Draw a panel per selection: a row per member, dark where it keeps a neuron."""
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.lenet5()
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=MEMBERS, epochs=3, quiet=True)
    scores = se.saliency(model, graph, scales, data, quiet=True)
    choices = {"learned": se.select(graph, scores, prune=0.5)}
    for name in ("random", "mirrored", "magnitude"):
        choices[name] = se.select(graph, prune=0.5, selection=name, members=MEMBERS)

    figure = Figure(figsize=(9, 4.3), layout="constrained")
    for axis, (name, subnets) in zip(figure.subplots(4, 1), choices.items(), strict=True):
        kept = torch.zeros(MEMBERS, graph.prunable[GROUP])
        for member, subnet in enumerate(subnets):
            kept[member, list(subnet.kept[GROUP])] = 1
        style.show_cells(axis, kept, cmap=ListedColormap([style.FAINT, style.BLUE]), vmin=0, vmax=1)
        for row in range(1, MEMBERS):
            axis.axhline(row - 0.5, color=style.INK, linewidth=0.6)
        overlap = statistics.mean(one.overlap(other) for one, other in itertools.combinations(subnets, 2))
        axis.set_title(f'selection="{name}": two members share {100 * overlap:.0f} % of what they keep', loc="left")
    axis.set_xlabel(f"the {graph.prunable[GROUP]} neurons of {GROUP}; a row per member, blue where it keeps one")
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)

"""Draw docs/images/concept-extraction.png: a weight, the rows and columns that a member keeps, the member's weight."""

import style
import torch
from matplotlib.figure import Figure

import structured_ensembles as se

LAYER = "layers.3"  # reads the neurons of layers.1


def draw() -> Figure:
    """Draw the weight of the second layer of a small network, before and after the cut."""
    torch.manual_seed(0)
    model = se.zoo.mlp(64, hidden=(24, 16))
    graph = se.trace(model, torch.zeros(2, 1, 8, 8))
    subnet = se.select(graph, prune=0.5, selection="random", members=1, seed=2)[0]
    small = se.extract(model, graph, subnet)
    full, cut = (network.get_submodule(LAYER).weight.detach() for network in (model, small))
    rows, columns = (list(subnet.kept[name]) for name in (LAYER, "layers.1"))
    masked = torch.full_like(full, torch.nan)
    masked[rows] = masked[rows].index_copy(1, torch.tensor(columns), full[rows][:, columns])
    if not torch.equal(cut, full[rows][:, columns]):
        raise RuntimeError("the extracted weight is not the kept rows and columns of the full one")

    figure = Figure(figsize=(9, 3.1), layout="constrained")
    limit = float(full.abs().max())
    widths = (full.shape[1], full.shape[1], cut.shape[1])
    axes = figure.subplots(1, 3, width_ratios=widths)
    titles = (
        f"{LAYER}.weight, {full.shape[0]}×{full.shape[1]}",
        "kept rows and columns",
        f"of the member, {cut.shape[0]}×{cut.shape[1]}",
    )
    for axis, values, title in zip(axes, (full, masked, cut), titles, strict=True):
        style.show_cells(axis, values, cmap=style.DIVERGING, vmin=-limit, vmax=limit, aspect="equal")
        axis.set_title(title, loc="left")
    axes[1].set(xticks=columns, yticks=rows, xlabel="kept neurons of layers.1", ylabel=f"kept neurons of {LAYER}")
    axes[1].tick_params(labelsize=6.5, length=2)
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)

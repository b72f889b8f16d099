"""Draws docs/images/kept-neurons.png, the picture in the README: what five members keep of one ResNet20.

python docs/kept_neurons.py
"""

from pathlib import Path

import matplotlib as mpl
import torch

import structured_ensembles as se

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.resnet20(in_channels=1)
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=5)
    subnets = se.select(graph, se.saliency(model, graph, scales, data), prune=0.5)

    sizes = graph.prunable
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(11, 1.6), width_ratios=list(sizes.values()), sharey=True, layout="constrained"
    )
    for axis, (name, size) in zip(axes, sizes.items(), strict=True):
        picture = torch.zeros(len(subnets), size)
        for member, subnet in enumerate(subnets):
            picture[member, list(subnet.kept[name])] = 1
        axis.imshow(
            picture, aspect="auto", cmap=mpl.colors.ListedColormap(["#e8edf3", "#0b5cad"]), interpolation="none"
        )
        axis.set_title(name.replace("layer", "").replace(".conv1", ""), fontsize=9)
        axis.set_xticks([])
        axis.set_yticks(range(len(subnets)), [f"member {member}" for member in range(len(subnets))], fontsize=8)
        axis.tick_params(length=0)
        axis.set_yticks([row - 0.5 for row in range(1, len(subnets))], minor=True)
        axis.grid(which="minor", axis="y", color="white", linewidth=2)
        axis.tick_params(which="minor", length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)
    figure.supxlabel("channels of the first convolution of each block (stage.block); dark: kept", fontsize=9)
    target = Path(__file__).parent / "images" / "kept-neurons.png"
    figure.savefig(target, dpi=160)
    print(target)


if __name__ == "__main__":
    main()

"""Draw docs/images/kept-neurons.png of the quickstart "Images": the neurons that five members keep of one ResNet20.

python docs/kept_neurons.py
"""

from pathlib import Path

import torch

import structured_ensembles as se
from structured_ensembles.report.figures import draw_kept_neurons


def main() -> None:
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.resnet20(in_channels=1)
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=5)
    subnets = se.select(graph, se.saliency(model, graph, scales, data), prune=0.5)

    figure = draw_kept_neurons(subnets)
    target = Path(__file__).parent / "images" / "kept-neurons.png"
    figure.savefig(target, dpi=160)
    print(target)


if __name__ == "__main__":
    main()

"""The walk up to extraction on real handwritten digits: `python -m structured_ensembles.demo`."""

import time

import torch

import structured_ensembles as se
from structured_ensembles.tables import text_table


def main() -> None:
    """Cut five half-width networks out of one ResNet20, and show what each kept."""
    start = time.perf_counter()
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.resnet20(num_classes=data.num_classes, in_channels=1)
    print(f"{data.name}: {len(data.train):,} images of handwritten digits to learn from, 8×8 pixels each\n")

    graph = se.trace(model, data.example())
    print(f"Which channels of a ResNet20 can be removed?\n\n{graph}\n")

    scales = se.learn_scales(model, graph, data, members=5, epochs=10, seed=0)
    scores = se.saliency(model, graph, scales, data)
    subnets = se.select(graph, scores, prune=0.5)
    networks = [se.extract(model, graph, subnet) for subnet in subnets]
    print(f"What each of five members keeps of {graph['layer1.0.conv1'].size} channels in layer1.0.conv1:\n")
    for member, subnet in enumerate(subnets):
        kept = subnet.kept["layer1.0.conv1"]
        print(f"  member {member}  " + " ".join("■" if channel in kept else "·" for channel in range(16)))

    print("\nHow many neurons two members share (1 is all; by chance 0.5):\n")
    rows = [(f"member {i}", *(f"{one.overlap(other):.2f}" for other in subnets)) for i, one in enumerate(subnets)]
    print(text_table(("", *map(str, range(len(subnets)))), rows))

    base = graph.num_parameters()
    members = sum(p.numel() for network in networks for p in network.parameters())
    print(
        f"\nOne network has {base:,} parameters, the five sub-networks {members:,}: {members / base:.2f} times as many."
    )
    print(f"Done in {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()

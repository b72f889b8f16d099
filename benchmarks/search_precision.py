"""Compare a search in bfloat16 with one in float32: how far apart are the vectors, and which neurons do members keep?

    python benchmarks/search_precision.py [--root FOLDER] [--samples 4000] [--epochs 3] [--seeds 0 1] [--json FILE]

ResNet20 on images of CIFAR-10, five members, half of the neurons pruned. What bfloat16 changes is put beside what
another order of the batches changes: the same search in float32, on the same images in another order. Distances are
root mean squares over the entries of all vectors; "moved" is how far the search in float32 went from where it began.
"""

from __future__ import annotations

import argparse

import torch

import structured_ensembles as se
from recording import arguments_of, record
from structured_ensembles.common.tables import text_table

MEMBERS = 5
PRUNE = 0.5


def main() -> None:
    """Search three times for each seed, and print the table."""
    arguments = arguments_of(__doc__, root="~/.cache/structured-ensembles", samples=4000, epochs=3, seeds=[0, 1])
    rows = [compare(seed, arguments) for seed in arguments.seeds]
    header = ("seed", "moved", "bfloat16 apart", "other order apart", "kept differently", "by other order")
    print(text_table(header, [tuple(f"{value:.4g}" for value in row.values()) for row in rows]))
    record(arguments, rows)


def compare(seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Compare the searches of one seed, which begin with the same vectors."""
    train = se.load_data("cifar10", arguments.root, seed=seed).train
    order = train.index[: arguments.samples]
    shuffled = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]
    data, other = (
        se.Data.from_arrays(train.inputs[rows], train.targets[rows], validation=0.0) for rows in (order, shuffled)
    )
    torch.manual_seed(seed)
    model = se.zoo.resnet20()
    graph = se.trace(model, data.example())
    searches = {"float32": (data, "float32"), "bfloat16": (data, "bfloat16"), "order": (other, "float32")}
    scales, kept = {}, {}
    for name, (images, precision) in searches.items():
        scales[name] = se.learn_scales(
            model, graph, images, MEMBERS, epochs=arguments.epochs, seed=seed, device=arguments.device,
            precision=precision,
        )  # fmt: skip
        scores = se.saliency(model, graph, scales[name], images, device=arguments.device)
        kept[name] = se.select(graph, scores, prune=PRUNE)
    drawn = se.Scales.draw(graph, MEMBERS, seed=seed)
    return {
        "seed": seed,
        "moved": distance(scales["float32"], drawn),
        "bfloat16": distance(scales["float32"], scales["bfloat16"]),
        "other_order": distance(scales["float32"], scales["order"]),
        "kept_differently": share_kept_differently(kept["float32"], kept["bfloat16"]),
        "kept_differently_by_order": share_kept_differently(kept["float32"], kept["order"]),
    }


def distance(one: se.Scales, other: se.Scales) -> float:
    """Return the root mean square of the differences of all entries."""
    differences = torch.cat([(one.vectors[name] - other.vectors[name]).flatten() for name in one.vectors])
    return float(differences.square().mean().sqrt())


def share_kept_differently(subnets: list[se.Subnet], others: list[se.Subnet]) -> float:
    """Return the share of the neurons that members keep in one choice, but not in the other."""
    pairs = [
        (set(subnet.kept[name]), set(other.kept[name]))
        for subnet, other in zip(subnets, others, strict=True)
        for name in subnet.kept
    ]
    return sum(len(mine - theirs) for mine, theirs in pairs) / sum(len(mine) for mine, _ in pairs)


if __name__ == "__main__":
    main()

"""How the cost of training grows: with the number of members, with the share that is pruned, with the data.

    python benchmarks/scale.py [--model resnet20] [--members 1 2 4 …] [--prunes 0 0.25 …] [--json FILE] [--figure FILE]

Three tables and one figure. The first two are milliseconds per step, the third seconds per epoch.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import structured_ensembles as se
from fleet import SIZES, ours, synthetic
from recording import arguments_of, record
from structured_ensembles.common.tables import text_table


def main() -> None:
    arguments = arguments_of(
        __doc__,
        model="resnet20",
        members=[1, 2, 4, 8, 12, 16],
        prunes=[0.0, 0.25, 0.5, 0.75, 0.8, 0.9],
        samples=[0],
        batch=128,
        steps=0,
        figure="",
    )
    fast = arguments.device.startswith("cuda")
    arguments.steps = arguments.steps or (60 if fast else 3)
    arguments.samples = [own for own in arguments.samples if own] or (
        [6400, 12800, 25600, 51200] if fast else [256, 512, 1024]
    )
    size, classes = SIZES[arguments.model]
    data = synthetic(arguments.steps * arguments.batch, size, classes)
    rows = [
        *(
            {"what": "members", "x": own, **ours(cut(arguments, own, 0.5), data, arguments)}
            for own in arguments.members
        ),
        *({"what": "prune", "x": own, **ours(cut(arguments, 5, own), data, arguments)} for own in arguments.prunes),
    ]
    for samples in arguments.samples:
        one = argparse.Namespace(**{**vars(arguments), "steps": samples // arguments.batch})
        figures = ours(cut(arguments, 5, 0.5), synthetic(samples, size, classes), one)
        rows.append({"what": "samples", "x": samples, **figures, "epoch_s": figures["ms"] * one.steps / 1000})
    for what, unit in (("members", "ms"), ("prune", "ms"), ("samples", "epoch_s")):
        own = [row for row in rows if row["what"] == what]
        print(text_table((what, unit), [(f"{row['x']:g}", f"{row[unit]:.3f}") for row in own]), "\n")
    record(arguments, rows)
    if arguments.figure:
        draw(rows, Path(arguments.figure))


def cut(arguments: argparse.Namespace, members: int, prune: float) -> list[nn.Module]:
    size, classes = SIZES[arguments.model]
    torch.manual_seed(0)
    base = getattr(se.zoo, arguments.model)(num_classes=classes)
    graph = se.trace(base, torch.randn(2, 3, size, size))
    subnets = se.select(graph, prune=prune, selection="random", members=members)
    return [se.extract(base, graph, subnet) for subnet in subnets]


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    names = {"members": ("members", "ms per step"), "prune": ("share pruned", "ms per step of five"),
             "samples": ("images", "seconds per epoch of five")}  # fmt: skip
    for panel, (what, labels) in zip(panels, names.items(), strict=True):
        own = [row for row in rows if row["what"] == what]
        values = [row.get("epoch_s", row["ms"]) for row in own]
        panel.plot([row["x"] for row in own], values, "o-", color="#0072B2")
        panel.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, None), ylim=(0, 1.1 * max(values)))
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

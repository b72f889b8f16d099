"""Measure how the time of training grows with the members, the pruned share and the data.

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
    """Measure the three series, print their tables and draw the figure."""
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
    arguments.samples = [samples for samples in arguments.samples if samples] or (
        [6400, 12800, 25600, 51200] if fast else [256, 512, 1024]
    )
    size, classes = SIZES[arguments.model]
    data = synthetic(arguments.steps * arguments.batch, size, classes)
    rows = [
        *(
            {"what": "members", "x": members, **ours(cut(arguments, members, 0.5), data, arguments)}
            for members in arguments.members
        ),
        *(
            {"what": "prune", "x": prune, **ours(cut(arguments, 5, prune), data, arguments)}
            for prune in arguments.prunes
        ),
    ]
    for samples in arguments.samples:
        settings = argparse.Namespace(**{**vars(arguments), "steps": samples // arguments.batch})
        figures = ours(cut(arguments, 5, 0.5), synthetic(samples, size, classes), settings)
        rows.append({"what": "samples", "x": samples, **figures, "epoch_s": figures["ms"] * settings.steps / 1000})
    for what, unit in (("members", "ms"), ("prune", "ms"), ("samples", "epoch_s")):
        series = [row for row in rows if row["what"] == what]
        print(text_table((what, unit), [(f"{row['x']:g}", f"{row[unit]:.3f}") for row in series]), "\n")
    record(arguments, rows)
    if arguments.figure:
        draw(rows, Path(arguments.figure))


def cut(arguments: argparse.Namespace, members: int, prune: float) -> list[nn.Module]:
    """Extract random members from a network of the zoo."""
    size, classes = SIZES[arguments.model]
    torch.manual_seed(0)
    base = getattr(se.zoo, arguments.model)(num_classes=classes)
    graph = se.trace(base, torch.randn(2, 3, size, size))
    subnets = se.select(graph, prune=prune, selection="random", members=members)
    return [se.extract(base, graph, subnet) for subnet in subnets]


def draw(rows: list[dict], path: Path) -> None:
    """Draw the three series side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    names = {"members": ("members", "ms per step"), "prune": ("share pruned", "ms per step of five"),
             "samples": ("images", "seconds per epoch of five")}  # fmt: skip
    for panel, (what, labels) in zip(panels, names.items(), strict=True):
        series = [row for row in rows if row["what"] == what]
        values = [row.get("epoch_s", row["ms"]) for row in series]
        panel.plot([row["x"] for row in series], values, "o-", color="#0072B2")
        panel.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, None), ylim=(0, 1.1 * max(values)))
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

"""Compare members in the memory of one network that learn from labels alone with taught ones, at several settings.

    python benchmarks/teaching.py [--root DATA] [--dataset mnist] [--model mlp] [--limit 2000] [--epochs 30]
                                  [--rate 0.05] [--members 4] [--seeds 0 1 2] [--shares 0.5 0.9 1.0]
                                  [--temperatures 1 2 4] [--json FILE]

For each seed: one network; a deep ensemble of `--members`; as many random members in the memory of one network; the
same members, and one whole network, taught by that deep ensemble. Training chooses nothing by validation samples
(`keep="last"`), so that a share and a temperature can be chosen by them. Rows that the JSON file has are skipped.
"""

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

import structured_ensembles as se
from recording import arguments_of, mean_and_error, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.runs.ingredients import read_data

FIGURES = ("cls/accuracy", "cls/member_accuracy", "cal/nll", "cal/ece15", "cal/nll_t", "size/parameters")
SPLITS = ("validation", "test")


def main() -> None:
    """Train the missing ensembles and print the figures of both splits."""
    arguments = arguments_of(
        __doc__, root="", dataset="mnist", model="mlp", limit=2000, epochs=30, rate=0.05, members=4,
        seeds=[0, 1, 2], shares=[0.5, 0.9, 1.0], temperatures=[1.0, 2.0, 4.0],
    )  # fmt: skip
    rows = json.loads(arguments.json.read_text())["rows"] if arguments.json and arguments.json.exists() else []
    for seed in arguments.seeds:
        run_seed(arguments, seed, rows)
    for split in SPLITS:
        by_name: dict[str, list[dict]] = {}
        for row in rows:
            by_name.setdefault(row["name"], []).append(row[split])
        cells = [
            (
                name,
                str(len(seeds)),
                *(mean_and_error([figures[figure] for figures in seeds]) for figure in FIGURES[:-1]),
            )
            for name, seeds in by_name.items()
        ]
        print(f"\n{split} split\n{text_table(('ensemble', 'seeds', *FIGURES[:-1]), cells)}")


def run_seed(arguments, seed: int, rows: list[dict]) -> None:
    """Train the ensembles of a seed that have no row yet, and record a row of each."""
    data = read_data(arguments.dataset, Path(arguments.root) if arguments.root else None, seed, arguments.limit, True)
    model = build_network(arguments, data, seed)
    recipe = se.Recipe.named("modern", epochs=arguments.epochs, rate=arguments.rate, keep="last")
    settings = {"recipe": recipe, "device": arguments.device, "seed": seed, "quiet": True}
    cut = {"memory": 1.0, "selection": "random", **settings}
    deep = cache(lambda: se.methods.deep_ensemble(model, data, arguments.members, **settings))
    trainings: dict[str, Callable[[], se.Ensemble]] = {
        "one network": lambda: se.methods.single_network(model, data, **settings),
        "deep": deep,
        "random": lambda: se.structured_ensemble(model, data, arguments.members, **cut),
    }
    for share in arguments.shares:
        for temperature in arguments.temperatures:
            how = f"taught, share {share:g}, temperature {temperature:g}"
            for name, members in (("random", arguments.members), ("one network", 1)):
                trainings[f"{name}, {how}"] = lambda members=members, share=share, temperature=temperature: (
                    se.structured_ensemble(model, data, members, teacher=se.Teacher(deep(), share, temperature), **cut)
                )
    for name, train in trainings.items():
        if any((row["name"], row["seed"]) == (name, seed) for row in rows):
            continue
        if "taught" in name:
            deep()  # of a resumed run: its training is not part of what is timed
        start = time.perf_counter()
        ensemble = train()
        row = {"name": name, "seed": seed, "seconds": time.perf_counter() - start}
        for split in SPLITS:
            figures = se.evaluate(ensemble, data, split)
            row[split] = {name: figures[name] for name in FIGURES}
        rows.append(row)
        record(arguments, rows)
        print(f"{name}, seed {seed}: {row['seconds']:.0f} s", flush=True)


def build_network(arguments, data: se.Data, seed: int) -> torch.nn.Module:
    """Build a network of the zoo with weights drawn from `seed`; an MLP has hidden layers of 512 and 256."""
    torch.manual_seed(seed)
    if arguments.model == "mlp":
        return se.zoo.mlp(data.example().flatten(1).shape[1], num_classes=data.num_classes, hidden=(512, 256))
    return getattr(se.zoo, arguments.model)(num_classes=data.num_classes, in_channels=data.shape[0])


if __name__ == "__main__":
    main()

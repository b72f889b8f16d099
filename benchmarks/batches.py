"""Compare members with their own batches, crops and dropout against members that share them.

    python benchmarks/batches.py [--root DATA] [--dataset cifar10] [--model resnet20] [--arms deep-modern deep-paper
                                 structured-modern structured-paper] [--seeds 0 1 2] [--minutes 9] [--json FILE]

deep: four networks from different initialisations; structured: five half-wide ones, selected by the paper's search. For
each seed both ensembles start from the same weights and are trained in one fleet: since a member of a fleet is the
network trained alone with its number, those with numbers 0, 1, 2, 3 are the ensemble with batches of their own, and
those with number 0 (including the first) the ensemble with shared ones. Runs that the JSON file already has are
skipped, and none is started that would not end within `--minutes`.
"""

import json
import time

import torch
from torch import nn

import structured_ensembles as se
from recording import arguments_of, mean_and_error, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.drawing import derive_seed

MEMBERS = {"deep": 4, "structured": 5}
FIGURES = ("cls/accuracy", "cls/member_accuracy", "cal/nll", "cal/nll_t", "cal/ece", "cal/ece_t", "div/disagreement")


def main() -> None:
    """Train the missing runs of every arm and print the table."""
    arguments = arguments_of(
        __doc__, root="", dataset="cifar10", model="resnet20",
        arms=["deep-modern", "deep-paper", "structured-modern", "structured-paper"],
        seeds=[0, 1, 2], epochs=0, search=10, minutes=1e9,
    )  # fmt: skip
    start = time.monotonic()
    rows = read_earlier_rows(arguments)
    for arm in arguments.arms:
        for seed in arguments.seeds:
            if any(row["arm"] == arm and row["seed"] == seed for row in rows):
                continue
            longest = max((row["seconds"] for row in rows if row["arm"] == arm), default=0.0)
            if time.monotonic() - start + 1.1 * longest > 60 * arguments.minutes:
                continue
            rows += compare(arguments, arm, seed)
            record(arguments, rows)
            print(f"{arm}, seed {seed}: {rows[-1]['seconds']:.0f} s, {rows[-1]['epochs']} epochs", flush=True)
    print(text_table(("arm", "batches", "seeds", *FIGURES), summarise(rows)))


def compare(arguments, arm: str, seed: int) -> list[dict]:
    """Train both ensembles of one arm and seed; return a row of figures for each."""
    start = time.monotonic()
    method, recipe_name = arm.split("-")
    data = se.load_data(arguments.dataset, arguments.root or None, seed=seed)
    changes = {"epochs": arguments.epochs} if arguments.epochs else {}
    recipe = se.Recipe.named(recipe_name, **changes)
    separate, shared = (build_members(arguments, method, data, seed) for _ in range(2))
    members = len(separate)
    # Both ensembles have the same first member: number 0, from the same weights.
    fleet = se.Ensemble([*separate, *shared[1:]])
    numbers = [*range(members), *[0] * (members - 1)]
    history = se.train(fleet, data, recipe, arguments.device, seed, numbers=numbers, quiet=True)
    trained = list(fleet.members)
    rows = []
    for batches, chosen in (("own", trained[:members]), ("shared", [trained[0], *trained[members:]])):
        ensemble = se.Ensemble(chosen)
        ensemble.adopt(data)
        ensemble.calibrate(data)
        figures = se.evaluate(ensemble, data)
        rows.append({"arm": arm, "seed": seed, "batches": batches, "engine": history.engine, "figures": figures})
    for row in rows:
        row |= {"seconds": time.monotonic() - start, "epochs": history.epochs, "networks": len(trained)}
    return rows


def build_members(arguments, method: str, data: se.Data, seed: int) -> list[nn.Module]:
    """Build the untrained members, the same for the same seed."""
    if method == "deep":
        return [
            build_network(arguments, data, derive_seed(seed, "weights", number)) for number in range(MEMBERS[method])
        ]
    key = (arguments.dataset, arguments.model, seed)
    model = build_network(arguments, data, seed)
    graph = se.trace(model, data.example())
    if key not in SUBNETS:
        settings = {"device": arguments.device, "quiet": True}
        scales = se.learn_scales(model, graph, data, MEMBERS[method], epochs=arguments.search, seed=seed, **settings)
        SUBNETS[key] = se.select(graph, se.saliency(model, graph, scales, data, **settings), prune=0.5)
    return [se.extract(model, graph, subnet) for subnet in SUBNETS[key]]


SUBNETS: dict = {}  # by data set, model and seed: both recipes train the same members


def build_network(arguments, data: se.Data, seed: int) -> nn.Module:
    """Build a network of the zoo with weights drawn from `seed`."""
    torch.manual_seed(seed)
    return getattr(se.zoo, arguments.model)(num_classes=data.num_classes, in_channels=data.shape[0])


def read_earlier_rows(arguments) -> list[dict]:
    """Read the rows of the JSON file; empty if there is none."""
    if arguments.json and arguments.json.exists():
        return json.loads(arguments.json.read_text())["rows"]
    return []


def summarise(rows: list[dict]) -> list[tuple[str, ...]]:
    """Average over seeds, with standard errors, by arm and batches, and their paired difference."""
    table = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        values = {
            batches: {row["seed"]: row["figures"] for row in rows if row["arm"] == arm and row["batches"] == batches}
            for batches in ("own", "shared")
        }
        seeds = sorted(values["own"])
        for batches in ("own", "shared"):
            cells = [[values[batches][seed].get(name) for seed in seeds] for name in FIGURES]
            table.append((arm, batches, str(len(seeds)), *map(mean_and_error, cells)))
        gaps = [
            [None if name not in values["own"][seed] else values["own"][seed][name] - values["shared"][seed][name]
             for seed in seeds]
            for name in FIGURES
        ]  # fmt: skip
        table.append((arm, "difference", str(len(seeds)), *map(mean_and_error, gaps)))
    return table


if __name__ == "__main__":
    main()

"""Measure the time to train a task, in plain trainings of the same network.

    python benchmarks/continual.py [--model half_vgg11] [--tasks 5] [--samples 1024] [--epochs 1] [--json FILE]

One table, one run. The unit is a plain training: the full backbone and a head, nothing masked, frozen or restored. The
other rows train the tasks of a structured learner one after the other: extracting the task's subnetwork, freezing,
restoring after every step, and writing back are included. The search for a task's neurons is a separate row. Rounds are
interleaved, and a ratio is the median over rounds of a row's time over that of the plain training in the same round, so
that other load on the machine slows both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.common.tables import text_table
from structured_ensembles.continual import StructuredLearner
from structured_ensembles.continual.freezing import freeze
from structured_ensembles.continual.heads import TaskNetwork, count_features, create_head
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.runs.machine import describe_machine

LIMIT = 1.15  # of issue 6


def main() -> None:
    """Time every row in interleaved rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="half_vgg11", help="half_vgg11, lenet5, or resnet20 (with batch norms)")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    rows = work(arguments)
    for run in rows.values():
        run()  # warm up
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(arguments.repeats):
        for name, run in rows.items():
            times[name].append(measure_seconds(run, arguments.device))
    plain = times["plain training"]
    figures = {
        name: {
            "ms": 1000 * statistics.median(seconds),
            "spread_ms": 1000 * (max(seconds) - min(seconds)),
            "ratio": statistics.median(row / unit for row, unit in zip(seconds, plain, strict=True)),
        }
        for name, seconds in times.items()
    }
    shown = [(name, *(f"{row[key]:.2f}" for key in ("ms", "spread_ms", "ratio"))) for name, row in figures.items()]
    print(text_table(("", "ms", "max-min", "times plain"), shown))
    worst = max(row["ratio"] for name, row in figures.items() if name.startswith("task"))
    print(f"\nworst task: {worst:.2f} times plain (limit {LIMIT})")
    if arguments.json:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        record = {
            "settings": settings,
            "date": date.today().isoformat(),
            **describe_machine(arguments.device),
            "worst": worst,
            "rows": figures,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def work(arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return the function of every row."""
    backbone = make_backbone(arguments.model)
    channels = next(backbone.parameters()).shape[1]
    classes = 2 * arguments.tasks
    images = torch.randint(
        0, 256, (arguments.samples * arguments.tasks, channels, arguments.size, arguments.size), dtype=torch.uint8
    )
    data = se.Data.from_arrays(images, torch.arange(len(images)) % classes, validation=0.0)
    sequence = se.continual.split_tasks(data, arguments.tasks)
    common = {"batch_size": arguments.batch, "augmentation": "none", "device": arguments.device, "quiet": True}

    def new_learner(epochs: int) -> StructuredLearner:
        return StructuredLearner(backbone, epochs=epochs, search_epochs=arguments.epochs, selection="random", **common)

    learner = new_learner(arguments.epochs)
    first = sequence[0].data.to(learner.device)
    features = count_features(learner.backbone, first.example().to(learner.device))
    head = create_head("linear", features, 2, seed=0).to(learner.device)

    def plain() -> None:
        learner._fit(TaskNetwork(clone_model(learner.backbone), clone_model(head)), first, 0)

    rows: dict[str, Callable[[], object]] = {"plain training": plain}
    for number in range(arguments.tasks):
        earlier = new_learner(0)  # zero epochs: only its neurons must be taken
        for task in sequence[:number]:
            earlier.learn(task)
        earlier.recipe = learner.recipe
        rows[f"task {number}"] = training(earlier, sequence[number], head)
        if number == arguments.tasks - 1:
            rows["search of the last task"] = searching(earlier, sequence[number], head)
    return rows


def training(learner: StructuredLearner, task: se.continual.Task, head: nn.Module) -> Callable[[], object]:
    """Return the training of a task's selected neurons as `learn` does it, without changing the learner."""
    data = task.data.to(learner.device)
    graph = learner.shared.trace(head, data.example().to(learner.device))
    network = TaskNetwork(learner.backbone, head)
    chosen = learner._choose(network, graph, data, learner.shared.owners.free(), seed=0)
    target = clone_model(learner.backbone)

    def run() -> None:
        subnetwork = learner.shared.cut(network, graph, chosen)
        learner._fit(
            subnetwork.network, data, task.number, after_step=freeze(subnetwork.network.backbone, subnetwork.past)
        )
        learner.shared.copy_into(target, subnetwork)

    return run


def searching(learner: StructuredLearner, task: se.continual.Task, head: nn.Module) -> Callable[[], object]:
    """Return the search for a task's neurons."""
    data = task.data.to(learner.device)
    graph = learner.shared.trace(head, data.example().to(learner.device))
    network = TaskNetwork(learner.backbone, head)

    def run() -> None:
        learner.selection = "learned"
        learner._choose(network, graph, data, learner.shared.owners.free(), seed=0)
        learner.selection = "random"

    return run


def make_backbone(model: str) -> nn.Module:
    """Build a backbone by name."""
    if model.startswith("resnet"):
        network = getattr(se.zoo, model)()
        network.fc = nn.Identity()
        return network
    return getattr(se.zoo, f"{model}_backbone")()


def measure_seconds(run: Callable[[], object], device: str) -> float:
    """Measure the seconds of one call."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

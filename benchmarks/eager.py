"""Measure a training step of one network in a plain eager loop, for every kind of network in the queue of runs.

    python benchmarks/eager.py [--models resnet20 resnet18 vgg11 wrn28_10 resnet32 vgg16] [--batch 128] [--steps 20]
                               [--precisions float32 bfloat16] [--json benchmarks/results/eager-h200.json]
    python benchmarks/eager.py --missing --minutes 2.5 --json benchmarks/results/eager-h200.json    fills the gaps
    python benchmarks/eager.py --device cpu --models resnet20 --batch 8 --steps 1 --precisions float32    a trial

A step is zero_grad, forward, cross-entropy, backward, SGD with momentum, at batch 128, on a batch that lies on the
device; bfloat16 is autocast with channels last. That is "one full network, eager" and "eager loop" of fleet.py, for one
network of each kind. Pruned networks are random subsets of the size that the run's members have; BatchEnsemble sees the
batch once for each member. The table of wall times in docs/results.md takes the faster precision.
Steps of finished runs come first. --missing leaves out the steps that benchmarks/results has for this device, and keeps
the rows of the JSON file; --minutes: begin no further step after that time.
"""

import argparse
import json
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from recording import arguments_of, from_scratch, milliseconds, record
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.sources import data_sets
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.layers import find_called_layers
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from structured_ensembles.paper.sections import plan_runs
from structured_ensembles.report.docs.wall_time import Step, describe_step, read_steps
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.machine import describe_machine
from structured_ensembles.zoo.by_name import build_model

MODELS = ["resnet20", "resnet18", "vgg11", "wrn28_10", "resnet32", "vgg16"]
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure the steps of all models and precisions and print the table."""
    arguments = arguments_of(
        __doc__, models=MODELS, batch=128, steps=0, precisions=["float32", "bfloat16"], missing=False, minutes=1e9
    )
    arguments.steps = arguments.steps or (20 if arguments.device.startswith("cuda") else 1)
    start = time.monotonic()
    rows = read_earlier_rows(arguments) if arguments.missing else []
    known = list_known_steps(rows, arguments.precisions, arguments.device) if arguments.missing else set()
    done = {(step_of(row), row["precision"]) for row in rows}
    steps = {step: run for step, run in find_steps().items() if step.model in arguments.models and step not in known}
    for number, (step, experiment) in enumerate(steps.items()):
        if time.monotonic() - start > 60 * arguments.minutes:
            print(f"{counted(len(steps) - number, 'step')} left: call again with --missing", flush=True)
            break
        measured = [
            {**vars(step), "precision": precision, **measure(experiment, precision, arguments)}
            for precision in arguments.precisions
            if (step, precision) not in done
        ]
        rows += measured
        times = ", ".join(f"{row['precision']} {row['ms']:.2f} ms" for row in measured)
        print(f"{step}: {times}", flush=True)
        record(arguments, rows)  # after every step, in case of an interrupt
    header = ("network", "pixels", "kind", "precision", "parameters", "ms")
    shown = [
        (row["model"], str(row["size"]), row["kind"], row["precision"], f"{row['parameters']:,}", f"{row['ms']:.2f}")
        for row in rows
    ]
    print(text_table(header, shown))


def read_earlier_rows(arguments: argparse.Namespace) -> list[dict]:
    """Read the rows of the JSON file, if it is of the same batch and device."""
    if arguments.json is None or not arguments.json.exists():
        return []
    earlier = json.loads(arguments.json.read_text(encoding="utf-8"))
    here = (arguments.batch, describe_machine(arguments.device)["device"])
    if (earlier["settings"]["batch"], earlier["device"]) != here:
        raise ValueError(f"{arguments.json} must be of batch and device {here}: give another file")
    return earlier["rows"]


def step_of(row: dict) -> Step:
    """Return the step that a row is of."""
    return Step(row["model"], row["width"], row["size"], row["kind"])


def list_known_steps(rows: Collection[dict], precisions: Collection[str], device: str) -> set[Step]:
    """List the steps that were measured on a device before: those of benchmarks/results, and `rows`.

    A step of the rows is known if they have it in all precisions: the faster one counts.
    """
    machine = describe_machine(device)["device"]
    recorded = {step for name, step in read_steps(ROOT / "benchmarks" / "results") if name == machine}
    measured: dict[Step, set[str]] = {}
    for row in rows:
        measured.setdefault(step_of(row), set()).add(row["precision"])
    complete = {step for step, known in measured.items() if known >= set(precisions)}
    return (recorded - measured.keys()) | complete


def find_steps() -> dict[Step, Experiment]:
    """Find the different training steps of the queue, each with the first run that has it; finished runs first."""
    steps: dict[Step, Experiment] = {}
    planned_runs = plan_runs(seeds=(0,))
    done = {run.name for run in planned_runs if (ROOT / "results" / run.name / "result.json").exists()}
    for planned in sorted(planned_runs, key=lambda run: run.name not in done):
        step = describe_step(planned.experiment)
        if step is not None:
            steps.setdefault(step, planned.experiment)
    return steps


def measure(experiment: Experiment, precision: str, arguments: argparse.Namespace) -> dict:
    """Measure the milliseconds of a step and count the parameters."""
    device = arguments.device
    if device.startswith("cuda"):
        from_scratch()
    torch.manual_seed(0)
    info = data_sets()[experiment.dataset]
    network = build_network(experiment)
    x = torch.randn(arguments.batch, *info.shape, device=device)
    y = torch.arange(arguments.batch, device=device) % info.num_classes
    step = training_step(network.to(device).train(), x, y, halved=precision == "bfloat16")
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"ms": milliseconds(step, device, arguments.steps), "parameters": parameters}


def build_network(experiment: Experiment) -> nn.Module:
    """Build one network as the run trains it."""
    info = data_sets()[experiment.dataset]
    arguments = {"num_classes": info.num_classes, "in_channels": info.shape[0], **experiment.model_arguments}
    base = build_model(experiment.model, **arguments)
    example = torch.zeros(2, *info.shape)
    settings, members = experiment.method_arguments, experiment.members
    if experiment.method == "batch-ensemble":
        return BatchEnsembleNetwork(base, find_called_layers(base, example).all, members, "tile")
    if experiment.method == "mc-dropout":
        return DropoutNetwork(base, find_called_layers(base, example).hidden, members)
    sizes = {name: settings[name] for name in ("prune", "memory") if name in settings}
    if not sizes:
        return base
    graph = se.trace(base, example, coupled=settings.get("coupled", False))
    subnet, *_ = se.select(graph, **sizes, selection="random", members=members)
    return se.extract(base, graph, subnet)


def training_step(network: nn.Module, x: Tensor, y: Tensor, halved: bool) -> Callable[[], None]:
    """Return a training step on x (batch, …) and y (batch,). halved: bfloat16 and channels last."""
    if halved:
        network = network.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=halved):
            logits = network(x)  # (batch, classes), or (members, batch, classes) of a BatchEnsemble
            rows = logits.flatten(0, -2)
            loss = F.cross_entropy(rows, y.repeat(len(rows) // len(y)))
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()

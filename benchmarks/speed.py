"""Measure every speed that we promise: one command, one table of before, aim and measured, one record.

    python benchmarks/speed.py --json benchmarks/results/speed-h200.json        about five minutes on an H200
    python benchmarks/speed.py --rows resnet20-5 predict --json FILE            some rows; others in FILE stay
    python benchmarks/speed.py --dependent --json FILE                          kernels start while others end
    python benchmarks/speed.py --device cpu --tiny                              a trial: small batches, few members

Training steps are at batch 128 in bfloat16, every member on its own batches. Rows of training have all rivals of
fleet.py in the same run (`ways` in the record): one full network and the members in an eager loop, vmap, grouped
convolutions. Memory is what is taken from the device at most. The record is written after every row, so that a run that
is stopped has lost nothing.

    resnet20-5, resnet20-15     five and fifteen half-wide ResNet20s
    resnet20-full, -half        one ResNet20, full and half-wide
    vgg11-5, resnet32-5         five half-wide VGG11s; five half-wide ResNet32s on 64×64 images
    resnet18-quarters           four ResNet18s in the memory of one, in steps of one full ResNet18, both ours
    start                       what the first epoch takes more: first with an empty cache of kernels, then a full one
    search                      an epoch of `learn_scales` of a ResNet20 on as many images as CIFAR-10 has
    rivals                      a step of BatchEnsemble and of MC-Dropout on a ResNet20; `fallbacks`: what is unfused
    predict                     outputs of five half-wide ResNet20s at batch 512, and of one full network, eager

Before and aim are figures of an H200; elsewhere nothing is judged.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from functools import cache, partial

import torch
from torch import nn

import fleet
import predict
import search
import structured_ensembles as se
from eager import training_step
from recording import arguments_of, from_scratch, milliseconds, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.cuda.launch import dependent_launches
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.layers import find_called_layers
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from structured_ensembles.runs.machine import describe_machine, source_digest

CIFAR10_SAMPLES = 50_000
PREDICTION_BATCH = 512


@dataclass(frozen=True)
class Line:
    """A line of the table: what is measured, what it was before there were programs, and what it is to become.

    before, aim: in `unit`; None where there is no number. MiB_before: of fleet-*.json in benchmarks/results.
    """

    name: str
    unit: str = "ms"
    before: float | None = None
    aim: float | None = None
    MiB_before: float | None = None


@dataclass(frozen=True)
class Row:
    """Lines that are measured together. measure: returns the figures of each, with "measured" in the line's unit."""

    key: str
    lines: Sequence[Line]
    measure: Callable[[argparse.Namespace], list[dict]]


def main() -> None:
    """Measure the chosen rows, and print and record the table after each."""
    keys = [row.key for row in ROWS]
    arguments = arguments_of(__doc__, rows=keys, batch=128, steps=0, tiny=False, start=False, dependent=False)
    arguments.steps = arguments.steps or (60 if arguments.device.startswith("cuda") else 3)
    if arguments.tiny:
        arguments.batch, arguments.steps = 4, 2
    if arguments.start:  # in a process of its own, see `start`
        print(json.dumps(train_half_networks(arguments)))
        return
    unknown = set(arguments.rows) - set(keys)
    if unknown:
        sys.exit(f"--rows must be among {', '.join(keys)}, not {', '.join(sorted(unknown))}")
    with dependent_launches() if arguments.dependent else nullcontext():
        run_rows(arguments, [row for row in ROWS if row.key in arguments.rows])


def run_rows(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Measure rows one by one; one that fails is recorded with its error, and the others go on."""
    results = earlier_results(arguments)
    for row in rows:
        begin = time.perf_counter()
        try:
            measured = row.measure(arguments)
        except Exception as error:
            measured = [{"measured": None, "error": f"{type(error).__name__}: {error}"[:300]}] * len(row.lines)
        seconds = time.perf_counter() - begin
        for line, figures in zip(row.lines, measured, strict=True):
            reached = has_reached(line, figures.get("measured"), arguments)
            common = {
                "row": row.key, **vars(line), "row_seconds": seconds, "reached": reached, "measured": None,
                "source": source_digest(), "date": date.today().isoformat(),
            }  # fmt: skip
            results[line.name] = {**common, **figures}
        record(arguments, list(results.values()))
        print(text_table(HEADER, [format_line(results[line.name]) for line in row.lines]), flush=True)
    print(f"\n{text_table(HEADER, [format_line(result) for result in results.values()])}")


def machine_of(description: dict) -> tuple[str, str, str]:
    """Return the device and the versions of PyTorch and Python that figures depend on."""
    versions = description["versions"]
    return description["device"], versions["torch"], versions["python"]


def earlier_results(arguments: argparse.Namespace) -> dict[str, dict]:
    """Return the lines of an earlier run in the same file by name; end if it was on another machine or PyTorch.

    They may be of other code of ours: every line names the source that it was measured with.
    """
    if arguments.json is None or not arguments.json.exists():
        return {}
    earlier = json.loads(arguments.json.read_text())
    machines = machine_of(earlier), machine_of(describe_machine(arguments.device))
    if machines[0] != machines[1] or earlier["settings"]["tiny"] != arguments.tiny:
        sys.exit(f"{arguments.json} has rows of another device, version or size: give another file, or delete it")
    source = earlier["versions"]["source"]
    for result in earlier["rows"]:
        result.setdefault("source", source)
    return {result["name"]: result for result in earlier["rows"]}


def has_reached(line: Line, measured: float | None, arguments: argparse.Namespace) -> bool | None:
    """Tell whether a line has reached its aim; None where it cannot be compared with it."""
    comparable = not arguments.tiny and "H200" in describe_machine(arguments.device)["device"]
    return measured <= line.aim if comparable and line.aim is not None and measured is not None else None


HEADER = ("", "before", "aim", "measured", "", "MiB before", "MiB")


def format_line(result: dict) -> tuple[str, ...]:
    """Format a line of the table; "reached" or "missed" where it can be compared with its aim."""
    unit, measured = result["unit"], result["measured"]
    verdict = {None: "", True: "reached", False: "missed"}[result["reached"]]
    values = [
        *(_format_number(result[name], unit) for name in ("before", "aim")),
        _format_number(measured, unit) if measured is not None else result.get("error", "–")[:60],
        verdict,
        *(_format_number(result.get(name), "") for name in ("MiB_before", "MiB")),
    ]
    return (result["name"], *values)


def _format_number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:,.0f}" if not unit else f"{value:.2f} {unit}"


def training_row(key: str, model: str, members: int, line: Line, prune: float = 0.5) -> Row:
    """Return a row of a training step of some networks: ours, with all rivals of fleet.py beside it."""

    def measure(arguments: argparse.Namespace) -> list[dict]:
        cuda = arguments.device.startswith("cuda")
        own_way = "ours, graph" if cuda else "ours, loop"
        unmeasured = ["ours, loop" if cuda else "ours, loop, one by one", "Lightning, one network"]
        settings = {"prune": prune, "rounds": 1, "compiled": [], "streams": [], "skip": unmeasured}
        count = min(members, 2) if arguments.tiny else members
        ways = fleet.compare(changed(arguments, **settings), model, count, bandwidth(arguments.device))
        ours = next(way for way in ways if way["name"] == own_way)
        return [
            {**{name: value for name, value in ours.items() if name != "name"}, "measured": ours["ms"], "ways": ways}
        ]

    return Row(key, (line,), measure)


def quarters_row() -> Row:
    """Return the row of four ResNet18s in the memory of one, in steps of the one, both trained by our engine."""

    def measure(arguments: argparse.Namespace) -> list[dict]:
        base, data = se.zoo.resnet18(), fleet.synthetic(arguments.steps * arguments.batch, 32, 10)
        graph = se.trace(base, data.example(), coupled=True)
        subnets = se.select(graph, memory=1.0, selection="random", members=4)
        quarters = train([se.extract(base, graph, subnet) for subnet in subnets], data, arguments)
        full = train([copy.deepcopy(base)], data, arguments)
        return [{**quarters, "measured": quarters["ms"] / full["ms"], "ways": [{"name": "one full ResNet18", **full}]}]

    return Row("resnet18-quarters", (Line("four ResNet18 in the memory of one", "× one full", 1.37, 1.0),), measure)


def start_row() -> Row:
    """Return the row of the seconds before the first step, each in a process of its own."""

    def measure(arguments: argparse.Namespace) -> list[dict]:
        command = [sys.executable, __file__, "--start", "--device", arguments.device, "--batch", str(arguments.batch)]
        command += ["--steps", str(arguments.steps)] + ["--tiny"] * arguments.tiny
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            figures = []
            for _ in range(2):  # with an empty cache, then with that of the first
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"the process that trains ended with {done.returncode}: {done.stderr[-200:]}")
                figures.append(json.loads(done.stdout.splitlines()[-1]))
        return [{**run, "measured": run["start"]} for run in figures]

    lines = (
        Line("start, first on a machine", "s", 16.0, 20.0),
        Line("start, kernels cached", "s", 1.4, 3.0),
    )
    return Row("start", lines, measure)


def train_half_networks(arguments: argparse.Namespace) -> dict:
    """Train five half-wide ResNet20s; returns the figures of a step and of the start."""
    base, data = se.zoo.resnet20(), fleet.synthetic(arguments.steps * arguments.batch, 32, 10)
    graph = se.trace(base, data.example())
    subnets = se.select(graph, prune=0.5, selection="random", members=2 if arguments.tiny else 5)
    return train([se.extract(base, graph, subnet) for subnet in subnets], data, arguments)


def search_row() -> Row:
    """Return the row of an epoch of the search, without what a search does once."""

    def measure(arguments: argparse.Namespace) -> list[dict]:
        samples = 2 * arguments.batch if arguments.tiny else CIFAR10_SAMPLES
        batches = -(-samples // arguments.batch)
        model, data = search.prepare(changed(arguments, model="resnet20", size=32, batches=batches))
        graph = se.trace(model, data.example())

        def run(epochs: int) -> None:
            se.learn_scales(model, graph, data, members=5, batch_size=arguments.batch, epochs=epochs, quiet=True)

        def epoch() -> dict:
            run(1)  # warm up
            one, four = (search.measure_seconds(partial(run, epochs), arguments.device) for epochs in (1, 4))
            return {"measured": (four - one) / 3, "start": one - (four - one) / 3, "batches": batches}

        return [fleet.attempt(epoch, arguments.device)]

    return Row("search", (Line("search, an epoch", "s", 1.6),), measure)


def rivals_row() -> Row:
    """Return the row of the steps of BatchEnsemble and MC-Dropout: ours, and in plain PyTorch."""

    def measure(arguments: argparse.Namespace) -> list[dict]:
        data = fleet.synthetic(arguments.steps * arguments.batch, 32, 10)
        base, members = se.zoo.resnet20(), 2 if arguments.tiny else 5
        layers = find_called_layers(base, data.example())
        networks = (
            BatchEnsembleNetwork(base, layers.all, members, "tile"),
            DropoutNetwork(base, layers.hidden, members),
        )
        results = []
        for network in networks:
            plain = copy.deepcopy(network)
            eager = fleet.attempt(lambda plain=plain: time_eager(plain, arguments), arguments.device)
            ours = train([network], data, arguments)
            results.append({**ours, "measured": ours["ms"], "ways": [{"name": "eager, bfloat16", **eager}]})
        return results

    return Row("rivals", (Line("BatchEnsemble, a step"), Line("MC-Dropout, a step")), measure)


def time_eager(network: nn.Module, arguments: argparse.Namespace) -> dict:
    """Time a step of a network in plain PyTorch, in bfloat16 on a GPU."""
    device = arguments.device
    x, y = torch.randn(arguments.batch, 3, 32, 32, device=device), torch.arange(arguments.batch, device=device) % 10
    step = training_step(network.to(device).train(), x, y, halved=device.startswith("cuda"))
    return {"ms": milliseconds(step, device, max(arguments.steps // 4, 1))}


def predict_row() -> Row:
    """Return the row of a prediction of five members, and of one full network."""

    def measure(arguments: argparse.Namespace) -> list[dict]:
        device, batch = arguments.device, arguments.batch if arguments.tiny else PREDICTION_BATCH
        if device.startswith("cuda"):
            from_scratch()
        _, ways = predict.make_ways(changed(arguments, model="resnet20", members=5, prune=0.5, size=32))
        x = torch.rand(batch, 3, 32, 32, device=device)

        def timed(name: str) -> dict:
            with torch.inference_mode():
                predict.warm_up(ways[name], x)
                return {"measured": milliseconds(lambda: ways[name](x), device, 5 if arguments.tiny else 50)}

        names = ("our ensemble", "one full network")
        return [fleet.attempt(lambda name=name: timed(name), device) for name in names]

    lines = (
        Line("prediction of five members", "ms", 6.0, 2.4),
        Line("prediction of one full network, eager", "ms", 2.4),
    )
    return Row("predict", lines, measure)


def train(networks: list[nn.Module], data: se.Data, arguments: argparse.Namespace) -> dict:
    """Train networks for some epochs by our fastest engine; returns the figures of a step, with memory."""
    engine = "graph" if arguments.device.startswith("cuda") else "loop"
    figures = fleet.attempt(lambda: fleet.ours(networks, data, arguments, engine=engine), arguments.device)
    if figures["ms"] is None:
        raise RuntimeError(figures["error"])
    return figures


def changed(arguments: argparse.Namespace, **settings: object) -> argparse.Namespace:
    """Return a copy of the arguments with other settings."""
    return argparse.Namespace(**{**vars(arguments), **settings})


@cache
def bandwidth(device: str) -> float:
    """Measure the bandwidth of a device once; its memory is free again."""
    measured = fleet.measure_bandwidth(device)
    if device.startswith("cuda"):
        from_scratch()
    return measured


ROWS = (
    training_row("resnet20-5", "resnet20", 5, Line("five half ResNet20", "ms", 2.57, 1.5, 592.5)),
    training_row("resnet20-15", "resnet20", 15, Line("fifteen half ResNet20", "ms", 7.1, 3.8, 1644.5)),
    training_row("resnet20-half", "resnet20", 1, Line("one half ResNet20", "ms", 1.1, 0.9, 172.5)),
    training_row("resnet20-full", "resnet20", 1, Line("one full ResNet20", "ms", None, 0.9), prune=0.0),
    training_row("vgg11-5", "vgg11", 5, Line("five half VGG11", "ms", 3.4, 2.5, 4732.5)),
    training_row("resnet32-5", "resnet32", 5, Line("five half ResNet32, 64×64", "ms", 18.3, 12.0, 2616.0)),
    quarters_row(),
    start_row(),
    search_row(),
    rivals_row(),
    predict_row(),
)

if __name__ == "__main__":
    main()

"""Measure search and saliency, in plain training steps of the same network.

    python benchmarks/search.py [--model resnet20] [--members 5] [--batch 128] [--repeats 5] [--json FILE]

One table, one run. The unit is a plain training step: forward, backward, SGD with momentum. Times are
medians over interleaved rounds, so that a busy machine slows all rows alike; memory is the peak that a row allocates.
The authors' code takes 1.2 to 1.3 units per search step and 23 to 29 units per batch of saliency.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

import structured_ensembles as se
from structured_ensembles.common.tables import text_table
from structured_ensembles.evaluation.memory import measure_peak_memory
from structured_ensembles.runs.machine import describe_machine


def main() -> None:
    """Time every row in interleaved rounds, measure its memory, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3 if torch.cuda.is_available() else 5)
    parser.add_argument("--batches", type=int, default=0, help="in an epoch, over which the one-time set-up is spread")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.batches = arguments.batches or (200 if arguments.device.startswith("cuda") else 1)

    rows = {name: work(arguments) for name, work in WORK.items()}
    for run in rows.values():
        run()  # warm up
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(arguments.repeats):
        for name, run in rows.items():
            times[name].append(measure_seconds(run, arguments.device) / arguments.batches)
    memory = {name: measure_peak_memory(run, arguments.device) for name, run in rows.items()}

    unit, unit_memory = statistics.median(times["plain step"]), memory["plain step"]
    figures = {
        name: {
            "ms": 1000 * statistics.median(seconds),
            "spread_ms": 1000 * (max(seconds) - min(seconds)),
            "ratio": statistics.median(seconds) / unit,
            "MiB": memory[name] / 2**20,
            "memory_ratio": memory[name] / unit_memory,
        }
        for name, seconds in times.items()
    }
    print(
        text_table(
            ("", "ms", "max-min", "steps", "peak MiB", "times plain"),
            [
                (name, *(f"{row[key]:.2f}" for key in ("ms", "spread_ms", "ratio", "MiB", "memory_ratio")))
                for name, row in figures.items()
            ],
        )
    )
    if arguments.json:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        machine = describe_machine(arguments.device)
        record = {"settings": settings, "date": date.today().isoformat(), **machine, "rows": figures}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def measure_seconds(run: Callable[[], object], device: str) -> float:
    """Measure the seconds of one call."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def prepare(arguments: argparse.Namespace) -> tuple[torch.nn.Module, se.Data]:
    """Build the network and random data on the device."""
    torch.manual_seed(0)
    model = getattr(se.zoo, arguments.model)().to(arguments.device)
    samples = arguments.batches * arguments.batch
    images = torch.randint(0, 256, (samples, 3, arguments.size, arguments.size), dtype=torch.uint8)
    data = se.Data.from_arrays(images, torch.arange(samples) % 10, validation=0.0)
    return model, data.to(arguments.device)


def plain_step(arguments: argparse.Namespace) -> Callable[[], object]:
    """Return an epoch of plain training."""
    model, data = prepare(arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def run() -> None:
        for inputs, targets in data.batches("train", arguments.batch, device=arguments.device):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return run


def search_step(arguments: argparse.Namespace, diversity: str | None = "mmd") -> Callable[[], object]:
    """Return an epoch of the search."""
    model, data = prepare(arguments)
    graph = se.trace(model, data.example())
    settings = {"members": arguments.members, "batch_size": arguments.batch, "diversity": diversity, "quiet": True}
    return lambda: se.learn_scales(model, graph, data, epochs=1, **settings)


def saliency_batch(arguments: argparse.Namespace) -> Callable[[], object]:
    """Return the saliency over an epoch."""
    model, data = prepare(arguments)
    graph = se.trace(model, data.example())
    scales = se.Scales.draw(graph, arguments.members)
    return lambda: se.saliency(model, graph, scales, data, batch_size=arguments.batch, quiet=True)


WORK = {
    "plain step": plain_step,
    "search step (mmd)": search_step,
    "search step (no penalty)": lambda arguments: search_step(arguments, None),
    "search step (overlap)": lambda arguments: search_step(arguments, "overlap"),
    "saliency of a batch": saliency_batch,
}

if __name__ == "__main__":
    main()

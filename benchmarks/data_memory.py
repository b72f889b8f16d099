"""Measure the memory of a cached data set: reading and evaluating it must copy it at most once.

    python benchmarks/data_memory.py [--dataset cifar10] [--root FOLDER] [--epochs 10]

Anonymous memory is copied by the process; the operating system keeps or drops the mapped file.
"""

import argparse
import json
from datetime import date
from pathlib import Path

import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.common.tables import text_table
from structured_ensembles.runs.machine import describe_machine


def main() -> None:
    """Measure the memory after reading and after every epoch, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(2)
    warm_up = se.Ensemble([nn.Flatten()])
    warm_up.logits(torch.zeros(512, 3, 32, 32))
    rows, start = [], memory()
    data = se.load_data(arguments.dataset, arguments.root)
    rows.append(("read from the cache", *difference(start)))
    size = sum(split.inputs.nbytes for split in (data.train, data.test))
    ensemble = se.Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(data.example(1).numel(), data.num_classes))])
    ensemble.adopt(data)
    peak = 0.0
    for _ in range(arguments.epochs):
        for split in ("train", "test"):
            se.evaluate(ensemble, data, split)
            peak = max(peak, difference(start)[0])
    rows.append((f"after {arguments.epochs} epochs of evaluation", *difference(start)))
    print(f"{arguments.dataset}: {size / 2**20:.0f} MiB of images\n")
    print(
        text_table(
            ("", "own MiB", "mapped MiB"), [(name, *(f"{value:.0f}" for value in values)) for name, *values in rows]
        )
    )
    print(f"\nlargest own memory between evaluations: {peak:.0f} MiB, {peak * 2**20 / size:.2f} times the images")
    if arguments.json:
        record = {
            "date": date.today().isoformat(),
            **describe_machine("cpu"),
            "image_MiB": size / 2**20,
            "peak_own_MiB": peak,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def memory() -> tuple[float, float]:
    """Return anonymous and file-backed resident memory of this process, in MiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["RssAnon"].split()[0]) / 1024, float(status["RssFile"].split()[0]) / 1024


def difference(start: tuple[float, float]) -> tuple[float, float]:
    """Return the memory beyond that at the start, in MiB."""
    now = memory()
    return now[0] - start[0], now[1] - start[1]


if __name__ == "__main__":
    main()

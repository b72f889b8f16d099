"""Measure the time of every corruption; corruption_rmse.py measures how much it changes images.

    python benchmarks/corruptions.py [--images 10000] [--severity 5] [--dataset cifar10] [--root FOLDER] [--json FILE]

One thread on a CPU, in seconds of process time, or a GPU.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import torch

import structured_ensembles as se
from structured_ensembles.common.tables import text_table
from structured_ensembles.evaluation.corruptions import CORRUPTIONS, corrupt
from structured_ensembles.runs.machine import describe_machine


def main() -> None:
    """Time every corruption and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    test = se.load_data(arguments.dataset, arguments.root).split("test")
    images = (next(iter(test.batches(arguments.images)))[0].float() / 255).to(arguments.device)
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    figures = {}
    for name in CORRUPTIONS:
        corrupt(images[:100], name, arguments.severity)  # warm up
        start = clock()
        corrupt(images, name, arguments.severity)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        figures[name] = {"seconds": clock() - start}
    total = sum(row["seconds"] for row in figures.values())
    rows = [(name, f"{row['seconds']:.3f}") for name, row in figures.items()]
    print(f"{len(images):,} images of {arguments.dataset} on {arguments.device}, severity {arguments.severity}\n")
    print(text_table(("corruption", "seconds"), rows))
    print(f"\nall: {total:.1f} s")
    if arguments.json:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        record = {
            "settings": settings,
            "date": date.today().isoformat(),
            **describe_machine(arguments.device),
            "seconds": total,
            "rows": figures,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

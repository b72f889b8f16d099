"""What every corruption costs, and how far it carries images from the original.

    python benchmarks/corruptions.py [--images 10000] [--severity 5] [--dataset cifar10] [--root FOLDER] [--json FILE]

One thread on a CPU, or a GPU. Distances are root mean squared differences of pixels in [0,1], at severities 1 to 5.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import torch

import structured_ensembles as se
from structured_ensembles.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from structured_ensembles.runs import machine
from structured_ensembles.tables import text_table


def main() -> None:
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
    found = {}
    for name in CORRUPTIONS:
        corrupt(images[:100], name, arguments.severity)  # warm up
        distances = [distance(images[:2000], corrupt(images[:2000], name, severity)) for severity in SEVERITIES]
        start = time.perf_counter()
        corrupt(images, name, arguments.severity)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        found[name] = {"seconds": time.perf_counter() - start, "distances": distances}
    total = sum(row["seconds"] for row in found.values())
    rows = [
        (name, f"{row['seconds']:.3f}", *(f"{value:.3f}" for value in row["distances"])) for name, row in found.items()
    ]
    print(f"{len(images):,} images of {arguments.dataset} on {arguments.device}, severity {arguments.severity}\n")
    print(text_table(("corruption", "seconds", *(f"distance {severity}" for severity in SEVERITIES)), rows))
    print(f"\nall: {total:.1f} s")
    if arguments.json:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        record = {"settings": settings, "date": date.today().isoformat(), **machine(), "seconds": total, "rows": found}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def distance(images: torch.Tensor, others: torch.Tensor) -> float:
    return float((images - others).square().mean((1, 2, 3)).sqrt().mean())


if __name__ == "__main__":
    main()

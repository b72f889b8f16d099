"""Compare the learned selection with variants and controls, on digits.

    python benchmarks/selection.py [--seeds 0 1 2 3 4] [--epochs 12] [--arms paper norm random] [--json FILE]

Five members at half width out of a ResNet20; the same recipe and seeds for every arm; mean ± deviation over seeds.
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch

import structured_ensembles as se
from structured_ensembles.common.tables import text_table
from structured_ensembles.runs.machine import describe_machine

ARMS = {
    "paper": {},  # scaling the layer's output, MMD
    "norm": {"placement": "norm"},
    "no penalty": {"diversity": None},
    "overlap": {"diversity": "overlap"},
    "random": {"selection": "random"},
}
FIGURES = ("cls/accuracy", "cls/member_accuracy", "cal/ece", "cal/nll")


def main() -> None:
    """Train every arm with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    recipe = se.Recipe.named("modern", epochs=arguments.epochs, augmentation="crop")
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in arguments.seeds:
        data = se.load_data("digits", seed=seed)
        torch.manual_seed(seed)
        model = se.zoo.resnet20(in_channels=1)
        for arm in ("one network", *arguments.arms):
            start = time.perf_counter()
            if arm == "one network":
                ensemble = se.methods.single_network(model, data, recipe=recipe, seed=seed, quiet=True)
            else:
                ensemble = se.structured_ensemble(model, data, recipe=recipe, seed=seed, quiet=True, **ARMS[arm])
            row = se.evaluate(ensemble, data) | {"seconds": time.perf_counter() - start}
            subnets = ensemble.subnets or ()
            shared = [subnet.overlap(other) for number, subnet in enumerate(subnets) for other in subnets[:number]]
            runs.setdefault(arm, []).append(row | ({"overlap": statistics.mean(shared)} if shared else {}))
    rows = [
        (arm, *(format_cell(name, arm_runs) for name in (*FIGURES, "overlap", "seconds")))
        for arm, arm_runs in runs.items()
    ]
    print(text_table(("arm", "accuracy %", "member %", "ECE %", "NLL", "overlap", "seconds"), rows))
    if arguments.json:
        record = {
            "date": date.today().isoformat(),
            **describe_machine("cuda" if torch.cuda.is_available() else "cpu"),
            "seeds": arguments.seeds,
            "epochs": arguments.epochs,
        }
        arguments.json.write_text(json.dumps(record | {"runs": runs}, indent=1) + "\n")


def format_cell(name: str, rows: list[dict[str, float]]) -> str:
    """Format mean ± deviation of a figure over seeds."""
    values = [row[name] * (100 if name.startswith("cls/") or name == "cal/ece" else 1) for row in rows if name in row]
    if not values:
        return "–"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


if __name__ == "__main__":
    main()

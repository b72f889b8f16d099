"""Measure time and memory of trace() on torchvision's networks.

    python benchmarks/trace.py [--models resnet50 vgg16 swin_t] [--json FILE]

Every network is traced in a separate process, whose peak resident memory is that of torch, the network and the trace.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from structured_ensembles.common.tables import text_table
from structured_ensembles.runs.machine import describe_machine

MODELS = (
    *("vgg16", "resnet18", "resnet50", "densenet121", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny"),
    *("regnet_y_400mf", "shufflenet_v2_x1_0", "googlenet", "vit_b_16", "swin_t"),
)


def main() -> None:
    """Trace every network in a process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help="trace this network in this process and print a line of JSON (for internal use)")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    figures = {}
    for name in arguments.models:
        output = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
        figures[name] = json.loads(output.stdout.splitlines()[-1])
    rows = [
        (
            name,
            f"{row['seconds']:.2f}",
            f"{row['MiB']:.0f}",
            f"{row['prunable']}/{row['groups']}",
            f"{row['channels']:,}",
        )
        for name, row in figures.items()
    ]
    print(text_table(("model", "seconds", "peak MiB", "groups", "channels"), rows))
    if arguments.json:
        record = {"date": date.today().isoformat(), **describe_machine("cpu"), "rows": figures}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(name: str) -> dict[str, float]:
    """Trace one network; return seconds, peak memory and numbers of groups and channels."""
    import contextlib

    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):  # torchvision's compiled operators may not match the installed torch
        with contextlib.suppress(RuntimeError):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    import structured_ensembles as se

    model = getattr(torchvision.models, name)(weights=None)
    se.trace(torch.nn.Linear(2, 2), torch.randn(2, 2))  # torch.export loads much of torch the first time
    start = time.perf_counter()
    graph = se.trace(model, torch.randn(1, 3, 224, 224))
    return {
        "seconds": time.perf_counter() - start,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "groups": len(graph.groups),
        "prunable": len(graph.prunable),
        "channels": sum(graph.prunable.values()),
    }


if __name__ == "__main__":
    main()

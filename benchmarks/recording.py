"""Helpers of the benchmarks: options, a clock that waits for the device, and the record of a run."""

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from structured_ensembles.runs.machine import describe_machine
from structured_ensembles.storage.files import write_text

WORKSPACES = os.environ.get("CUBLAS_WORKSPACE_CONFIG")  # the user's setting, if any


def arguments_of(description: str | None, only_cpu: bool = False, **options: Any) -> argparse.Namespace:
    """Parse options by name and default; a list takes several values, False is a switch.

    `--json` is always added, and `--device` unless the benchmark runs on the CPU only.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
            continue
        several = isinstance(default, list)
        option_type = type(default[0] if several else default)
        parser.add_argument(f"--{name}", type=option_type, default=default, nargs="*" if several else None)
    if only_cpu:
        parser.set_defaults(device="cpu")
    else:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def record(arguments: argparse.Namespace, rows: Any) -> None:
    """Write settings, machine and rows to the file of `--json`, if there is one, whole or not at all."""
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        machine = describe_machine(arguments.device)
        contents = {"settings": settings, "date": date.today().isoformat(), **machine, "rows": rows}
        write_text(arguments.json, json.dumps(contents, indent=1) + "\n")


def milliseconds(run: Callable[[], object], device: str, repeats: int, rounds: int = 3) -> float:
    """Measure the milliseconds of one call: the median over rounds of `repeats` calls."""
    run()
    times = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        wait(device)
        times.append((time.perf_counter() - start) / repeats)
    return 1000 * statistics.median(times)


def from_scratch() -> int:
    """Free all unused GPU memory; return the bytes in use.

    Segments that are partly in use cannot be freed and count for the next measurement. The small workspaces that our
    graphs request from cuBLAS do not.
    """
    gc.collect()
    if WORKSPACES is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def wait(device: str) -> None:
    """Wait until the device has finished."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def mean_and_error(values: list[float | None]) -> str:
    """Format mean ± standard error of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else math.nan
    return f"{statistics.mean(known):.4f} ± {error:.4f}"

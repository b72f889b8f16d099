"""Trace and cut models of torchvision, timm and transformers, and check the cut; beside Torch-Pruning.

    python benchmarks/models.py --json benchmarks/results/models-cpu.json [--only REGEX] [--jobs 1] [--again] [--docs]

For each model: does `trace` follow it, in how many seconds; how many groups can be pruned; how many parameters are left
at prune=0.5 (residual sums included, coupled=True); and is the extracted network equal, in evaluation and in training
mode, to the full network with the dropped channels masked. How many are left with every option on (whole heads, and
what norms mix: not exact). Torch-Pruning prunes the same model at ratio 0.5. Weights
are random, nothing is downloaded, everything runs on the CPU.

Every check has a process of its own, with a limit of time and memory. Rows that the file has already are kept, unless
`--again`; it is written after every row, so that a run that was stopped goes on. `--docs` writes docs/models.md.
Needs the extra `models` and torch-pruning.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import structured_ensembles as se
from model_list import Entry, declare_operators, list_models
from recording import record
from structured_ensembles.checking.model_check import check_model, peak_megabytes
from structured_ensembles.common.inputs import call
from structured_ensembles.report.docs.models import PAGE, RECORD, render_models
from torch_pruning_check import check_torch_pruning

ROOT = Path(__file__).resolve().parents[1]
PRUNE = 0.5
PATIENCE = 5  # a check may take so many times its processor time, on a busy machine


def main() -> None:
    """Check the models that have no row yet, and print each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / RECORD)
    parser.add_argument("--only", default="", help="check only models whose library/name has this regular expression")
    parser.add_argument("--jobs", type=int, default=1, help="how many checks run at a time")
    parser.add_argument("--seconds", type=float, default=60, help="limit of one check's processor time")
    parser.add_argument("--gigabytes", type=float, default=12, help="limit of one check's memory")
    parser.add_argument("--again", action="store_true", help="repeat the rows that the file has")
    parser.add_argument("--docs", action="store_true", help="write the page from the file at the end")
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else {}
    entries = {name: entry for name, entry in list_models().items() if re.search(arguments.only, name)}
    if not arguments.again:
        entries = {name: entry for name, entry in entries.items() if set(TOOLS) - rows.get(name, {}).keys()}
    if entries:
        run(entries, rows, arguments)
    if arguments.docs:
        (ROOT / PAGE).write_text(render_models(json.loads(arguments.json.read_text())), encoding="utf-8")


def run(entries: dict[str, Entry], rows: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Check models; write the file after each."""
    _load_libraries()
    settings = argparse.Namespace(
        json=arguments.json,
        device="cpu",
        prune=PRUNE,
        seconds=arguments.seconds,
        gigabytes=arguments.gigabytes,
        megabytes_of_libraries=peak_megabytes(),
        versions=_versions(),
    )
    checks = [(name, tool) for name in entries for tool in TOOLS if arguments.again or tool not in rows.get(name, {})]
    for (name, tool), figures in limited(checks, entries, arguments):
        entry = entries[name]
        rows.setdefault(name, {"library": entry.library, "family": entry.family})[tool] = figures
        listed = {known: rows[known] for known in list_models() if known in rows}  # in the order of the list
        record(settings, listed)
        print(f"{name} {tool}: {json.dumps(figures)[:300]}", flush=True)


def check_ours(model: torch.nn.Module, example: Any) -> dict[str, Any]:
    """Check `trace` and `extract` on a model."""
    check = check_model(model, example, prune=PRUNE)
    row = asdict(check) | {"cut": check.cut, "exact": check.exact}
    for mode in ("evaluation", "training"):
        difference = getattr(check, mode)
        if difference is not None:
            row[mode]["exact"] = difference.exact
    return row


def count_everything(model: torch.nn.Module, example: Any) -> dict[str, Any]:
    """Count the parameters that are left with every option of `trace` on: whole heads, and what norms mix."""
    graph = se.trace(model, example, coupled=True, approximate=True, nested="all")
    parameters = graph.num_parameters()
    if not graph.prunable:
        return {"left": parameters, "parameters": parameters}
    (subnet,) = se.select(graph, prune=PRUNE, selection="random", members=1)
    with torch.no_grad():
        call(se.extract(model, graph, subnet).eval(), example)  # it must run
    return {"left": graph.num_parameters(subnet.counts), "parameters": parameters}


TOOLS: dict[str, Callable[[torch.nn.Module, Any], dict[str, Any]]] = {
    "ours": check_ours,
    "everything": count_everything,
    "torch_pruning": partial(check_torch_pruning, ratio=PRUNE),
}


def limited(
    checks: list[tuple[str, str]], entries: dict[str, Entry], arguments: argparse.Namespace
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Run each check in a forked process, `jobs` at a time; yield its figures, or the error that ended it."""
    context = multiprocessing.get_context("fork")  # libraries are loaded once
    waiting, running = list(checks), {}
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            check = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            limits = (int(arguments.seconds), int(arguments.gigabytes * 2**30))
            process = context.Process(target=_check, args=(entries[check[0]], check[1], limits, sender))
            process.start()
            sender.close()
            running[receiver] = (check, process, time.monotonic() + PATIENCE * arguments.seconds)
        first_deadline = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), timeout=max(0, first_deadline - time.monotonic()))
        for receiver, (check, process, deadline) in list(running.items()):
            if receiver in ready:
                try:
                    figures = receiver.recv()
                except EOFError:
                    process.join()
                    out_of_time = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
                    reason = f"took more than {arguments.seconds:g} s" if out_of_time else "the process broke off"
                    figures = {"error": reason}
            elif time.monotonic() >= deadline:
                figures = {"error": f"took more than {arguments.seconds:g} s"}
            else:
                continue
            process.kill()
            process.join()
            receiver.close()
            del running[receiver]
            yield check, figures


def _check(entry: Entry, tool: str, limits: tuple[int, int], sender: Connection) -> None:
    """Make a model and check it; send the figures. The body of a forked process."""
    import resource

    seconds, size = limits
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lasts
    try:
        torch.manual_seed(0)
        sender.send(TOOLS[tool](entry.make(), entry.example()))
    except BaseException as error:
        sender.send({"error": f"{type(error).__name__}: {str(error)[:200]}"})


def _load_libraries() -> None:
    """Import what all models need, before processes are forked."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    declare_operators()
    import timm  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    for name in ("BertForSequenceClassification", "LlamaForSequenceClassification", "ViTForImageClassification"):
        getattr(transformers, name)
    se.trace(torch.nn.Linear(2, 2), torch.randn(2, 2))  # torch.export loads much of torch the first time


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that are compared."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "torchvision", "timm", "transformers", "torch-pruning")}


if __name__ == "__main__":
    main()

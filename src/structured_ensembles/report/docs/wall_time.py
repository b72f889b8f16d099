"""Wall time of every finished run beside that of a plain eager loop in PyTorch.

`benchmarks/eager.py` measures a training step of every kind of network that the queue has; on a device where it has not
been run, the records of `benchmarks/fleet.py` are used, for the networks that it has.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from structured_ensembles.common.markdown import write_table
from structured_ensembles.data.sources import data_sets
from structured_ensembles.paper.sections import Run
from structured_ensembles.report.docs.records import Records
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.finished import Finished
from structured_ensembles.runs.folder import read_history
from structured_ensembles.training import Recipe

BATCH = 128  # of the measured steps
VALIDATION = 0.1  # of the training images, held out
EAGER = "eager-*.json"
FLEETS = "fleet*-*.json"
NOT_MEASURED = "not measured"
HEADER = ("run", "seconds", "epochs", "network-epochs", "engine", "eager step (ms)", "eager loop (s)", "eager / ours")


@dataclass(frozen=True, order=True)
class Step:
    """Training step of one network, by all that determines its time: the network, the size of its images, its kind.

    kind: "full", "prune=0.5", "memory=1 of 4", "memory=1 of 4, coupled", "batch-ensemble ×5" or "mc-dropout".
    """

    model: str
    width: int
    size: int
    kind: str

    def __str__(self) -> str:
        wide = f" ×{self.width} wide" if self.width > 1 else ""
        return f"{self.model}{wide}, {self.size}×{self.size}, {self.kind}"


def describe_step(experiment: Run) -> Step | None:
    """Describe a training step of one network of an experiment; return None for continual learners."""
    if not isinstance(experiment, Experiment):
        return None
    settings, members = experiment.method_arguments, experiment.members
    kinds = {"batch-ensemble": f"batch-ensemble ×{members}", "mc-dropout": "mc-dropout"}
    kind = kinds.get(experiment.method, "full")
    if "memory" in settings:
        kind = f"memory={settings['memory']:g} of {members}{', coupled' * bool(settings.get('coupled'))}"
    elif "prune" in settings:
        kind = f"prune={settings['prune']:g}"
    side = data_sets()[experiment.dataset].shape[-1]
    return Step(experiment.model, experiment.model_arguments.get("width", 1), side, kind)


def read_steps(folder: Path) -> dict[tuple[str, Step], float]:
    """Read the milliseconds of a step by device; of several records and precisions the fastest counts."""
    milliseconds: dict[tuple[str, Step], float] = {}
    measured = set()
    for path in sorted(folder.glob(EAGER)):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["settings"]["batch"] != BATCH:
            continue
        for row in record["rows"]:
            key = (record["device"], Step(row["model"], row["width"], row["size"], row["kind"]))
            milliseconds[key] = min(row["ms"], milliseconds.get(key, math.inf))
            measured.add(key)
    for path in sorted(folder.glob(FLEETS)):
        record = json.loads(path.read_text(encoding="utf-8"))
        for row in record["rows"]:
            step = _fleet_step(row, record["settings"])
            if step is None or (key := (record["device"], step)) in measured:
                continue
            if row.get("ms"):
                members = 1 if step.kind == "full" else row["members"]
                milliseconds[key] = min(row["ms"] / members, milliseconds.get(key, math.inf))
    return milliseconds


def _fleet_step(row: Mapping[str, Any], settings: Mapping[str, Any]) -> Step | None:
    """Return the step that a row of `benchmarks/fleet.py` measured; None unless it is an eager loop."""
    if settings["batch"] != BATCH:
        return None
    kinds = {"one full network, eager": "full"}
    kinds |= dict.fromkeys(("eager loop", "eager loop, bfloat16"), f"prune={settings['prune']:g}")
    kind = kinds.get(row["name"])
    return None if kind is None else Step(row["model"], 1, 64 if row["model"] == "resnet32" else 32, kind)


def wall_time_table(records: Records, steps: Mapping[tuple[str, Step], float]) -> str:
    """Write a line for every finished run, in the order of the queue."""
    done = [planned.experiment for planned in records.planned if records.is_done(planned)]
    lines = [_line(experiment, records.done[experiment.folder], steps) for experiment in done]
    return write_table(HEADER, lines, right=range(1, len(HEADER)))


def _line(experiment: Run, run: Finished, steps: Mapping[tuple[str, Step], float]) -> tuple[str, ...]:
    """Format the line of a finished run."""
    seconds, epochs, by_step = run.seconds, run.result.get("epochs"), count_network_epochs(experiment, run)
    shown = [f"`{run.folder.name}`", f"{seconds:,.0f}", _or_dash(epochs), _or_dash(sum(by_step.values()) or None)]
    shown.append(run.result.get("engine") or "–")
    milliseconds = [steps.get((run.result["device"], step)) for step in by_step]
    known = [ms for ms in milliseconds if ms is not None]
    if not by_step or len(known) < len(by_step) or not isinstance(experiment, Experiment):
        return (*shown, NOT_MEASURED, "–", "–")
    network_seconds = sum(ms / 1000 * trained for ms, trained in zip(known, by_step.values(), strict=True))
    eager = count_steps_per_epoch(experiment) * network_seconds
    return (*shown, ", then ".join(f"{ms:.1f}" for ms in known), f"{eager:,.0f}", f"{eager / seconds:.1f}")


def count_network_epochs(experiment: Run, run: Finished) -> dict[Step, int]:
    """Count the epochs of all networks of a run by their training step: one row of the history each.

    Whole networks that are trained before the members, a base or teachers, have numbers from the members' on.
    """
    step = describe_step(experiment)
    if step is None or not isinstance(experiment, Experiment):
        return {}
    whole = replace(step, kind="full")
    rows = read_history(run.folder, run.result)
    return Counter(whole if int(row["member"] or 0) >= experiment.members else step for row in rows)


def count_steps_per_epoch(experiment: Experiment) -> int:
    """Return the number of training steps per epoch."""
    images = data_sets()[experiment.dataset].train
    trained = images - round(VALIDATION * images) if experiment.validation else images
    recipe = Recipe.named(experiment.recipe, **experiment.changes)
    return math.ceil(min(trained, experiment.limit or trained) / recipe.batch_size)


def _or_dash(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"

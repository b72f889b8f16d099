"""`sens continual`: learn a data set task after task and keep everything about it in one folder."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from structured_ensembles import zoo
from structured_ensembles.continual import LEARNERS, AccuracyMatrix, Learner, run_sequence, split_tasks
from structured_ensembles.continual.owning import OwningLearner
from structured_ensembles.continual.tasks import BENCHMARKS
from structured_ensembles.experiment import fitting_arguments, read_data
from structured_ensembles.files import write_atomically, write_text
from structured_ensembles.models import build_model, find_function
from structured_ensembles.report.continual_figures import capacity_used
from structured_ensembles.runs import machine, open_run
from structured_ensembles.tables import text_table


def continual(
    out: Path | None = None,
    dataset: str = "digits",
    tasks: int | None = None,
    model: str = "lenet5",
    method: str = "structured",
    seed: int = 0,
    epochs: int | None = None,
    prune: float | None = None,
    scope: Literal["layer", "network"] | None = None,
    extraction: Literal["hard", "soft"] | None = None,
    head: Literal["linear", "paper"] = "linear",
    optimizer: Literal["adam", "adamw", "sgd"] = "adam",
    rate: float = 1e-3,
    batch_size: int = 128,
    shuffle_labels: bool = False,
    model_arguments: dict[str, Any] | None = None,
    method_arguments: dict[str, Any] | None = None,
    root: Path | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> int:
    """Learn a data set task after task; a run folder that exists is resumed.

    Args:
        out: the run folder; by default runs/continual-DATASET-MODEL-METHOD-SEED
        dataset: a name (sens datasets), or package.module:function that returns a Data
        tasks: how many tasks to split the classes into; by default as many as the benchmark has
        model: lenet5, half-vgg11, or package.module:function that returns a backbone
        method: structured, naive, single, supsup, pruning, batch-ensemble, or package.module:class
        seed: of everything random
        epochs: how long a task is trained; by default as long as the paper does for the data set
        prune: the share of neurons that a task leaves to others (structured)
        scope: rank the neurons of each layer, or of the whole network (structured)
        extraction: rank the free neurons only, or all (structured)
        head: one linear layer per task, or the three of the authors' code
        optimizer: new for every task
        rate: the learning rate
        batch_size: samples in a batch
        shuffle_labels: permute the classes before they are split
        model_arguments: what the model function is called with, besides the channels of the data
        method_arguments: further arguments of the method
        root: where data sets are kept
        device: auto, cpu, cuda, …
        quiet: no progress

    """
    folder = out or Path("runs") / "-".join(["continual", dataset, model, method, str(seed)]).replace(":", ".")
    usual = BENCHMARKS.get(dataset)
    number = tasks if usual is None or tasks is not None else usual.tasks
    if number is None:
        raise ValueError(f"tasks must be given for {dataset!r}: only {', '.join(BENCHMARKS)} have a usual number")
    own = {"prune": prune, "scope": scope, "extraction": extraction}
    arguments = {
        "epochs": epochs if epochs is not None else 30 if usual is None else usual.epochs,
        "head": head,
        "optimizer": optimizer,
        "rate": rate,
        "batch_size": batch_size,
        **{name: value for name, value in own.items() if value is not None},
        **(method_arguments or {}),
    }
    config = {
        "dataset": dataset,
        "tasks": number,
        "shuffle_labels": shuffle_labels,
        "model": model,
        "model_arguments": model_arguments or {},
        "method": method,
        "method_arguments": arguments,
        "seed": seed,
    }
    make = find_function("method", method, LEARNERS)
    data = read_data(dataset, root, seed)
    sequence = split_tasks(data, number, shuffle_labels, seed)
    torch.manual_seed(seed)
    name = backbone_name(model)
    given = fitting_arguments(model, data, model_arguments or {})
    given.pop("num_classes", None)
    backbone = build_model(name, **given)
    try:
        learner: Learner = make(backbone, seed=seed, device=device, quiet=quiet, **arguments)
    except TypeError as error:
        raise ValueError(f"method {method!r} does not take these arguments: {error}") from error
    done = open_run(folder, config)
    if done is None:
        start = time.perf_counter()
        matrix = run_sequence(learner, sequence, folder)
        done = close(folder, learner, matrix, time.perf_counter() - start)
    else:
        print(f"{folder} is done already")
    show(method, done)
    print(f"\n{done['seconds']:.0f} s; see {folder}")
    return 0


def backbone_name(model: str) -> str:
    """The zoo's backbone for a network that has one, or the user's own function."""
    backbones = [name.removesuffix("_backbone") for name in zoo.__all__ if name.endswith("_backbone")]
    plain = model.replace("-", "_").removesuffix("_backbone")
    if ":" in model:
        return model
    if plain not in backbones:
        raise ValueError(
            f"model must be one of {', '.join(backbones)}, or package.module:function that returns a backbone "
            f"(inputs to pooled features), not {model!r}"
        )
    return f"{plain}_backbone"


def close(folder: Path, learner: Learner, matrix: AccuracyMatrix, seconds: float) -> dict[str, Any]:
    """Write the figures and the results; `result.json` comes last and says that the run is done."""
    pictures = {"accuracy.png": matrix.figure()}
    capacity = None
    if isinstance(learner, OwningLearner):
        found = learner.capacity()
        pictures["capacity.png"] = capacity_used(found)
        capacity = {"sizes": dict(found.sizes), "taken": dict(found.taken), "free": found.free}
    for name, figure in pictures.items():
        write_atomically(folder / name, lambda part, figure=figure: figure.savefig(part, format="png", dpi=150))  # type: ignore[misc]
    result = {
        "figures": matrix.figures,
        "matrix": matrix.to_dict(),
        "memory": learner.memory().to_dict(),
        "capacity": capacity,
        "file_bytes": (folder / "learner.safetensors").stat().st_size,
        "seconds": round(seconds, 3),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine(),
    }
    write_text(folder / "result.json", json.dumps(result, indent=1) + "\n")
    return result


def show(method: str, result: dict[str, Any]) -> None:
    memory = result["memory"]
    print(AccuracyMatrix.from_dict(result["matrix"]).table())
    print()
    percent = [(name.replace("_", " "), f"{100 * value:.2f} %") for name, value in result["figures"].items()]
    print(text_table(("", method), percent))
    print()
    header = ("memory", "backbone", "tasks' own", "masks", "heads", "file")
    sizes = [f"{memory[name]:,} floats" for name in ("backbone", "factors")]
    cells = (
        *sizes,
        f"{memory['stored_masks']:,} bits",
        f"{memory['heads']:,} floats",
        f"{result['file_bytes']:,} bytes",
    )
    print(text_table(header, [("", *cells)]))
    if result["capacity"] is not None and not any(result["capacity"]["free"].values()):
        print("\nno neuron is free any more: further tasks would learn their heads alone")

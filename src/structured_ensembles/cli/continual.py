"""`sens continual`: learn a data set task after task and keep everything about it in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from structured_ensembles.cli.hints import suggest_commands
from structured_ensembles.cli.threads import describe_device, threads_for_work, work_of_batch
from structured_ensembles.common.checks import check_whole
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.progress import say
from structured_ensembles.common.tables import escape_control_characters, text_table
from structured_ensembles.continual.experiment import (
    ContinualExperiment,
    PreparedSequence,
    prepare_continual,
    run_prepared,
)
from structured_ensembles.continual.results import rebuild_capacity, rebuild_matrix
from structured_ensembles.runs.folder import describe_finished_run


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
    limit: int | None = None,
    root: Path | None = None,
    device: str = "auto",
    threads: int | None = None,
    quiet: bool = False,
) -> int:
    """Learn a data set task after task; an existing run folder is resumed.

    Args:
        out: the run folder; by default runs/continual-DATASET-MODEL-METHOD-SEED, with what differs from the defaults
        dataset: a name (sens datasets), folder:PATH?size=64 (a folder of pictures for each class), or
            package.module:function that returns a Data
        tasks: how many tasks to split the classes into; by default as many as the benchmark has
        model: lenet5, half-vgg11, or package.module:function that returns a backbone
        method: structured, naive, single, supsup, pruning, batch-ensemble, or package.module:class
        seed: of all random numbers
        epochs: how long a task is trained; by default as long as the paper does for the data set
        prune: the share of neurons that a task leaves to others (structured)
        scope: rank the neurons of each layer, or of the whole network (structured)
        extraction: rank the free neurons only, or all (structured)
        head: one linear layer per task, or the three of the authors' code
        optimizer: which starts anew with every task
        rate: the learning rate
        batch_size: samples in a batch
        shuffle_labels: permute the classes before they are split
        model_arguments: what the model function is called with; those of the zoo get the channels of the data, too
        method_arguments: further arguments of the method
        limit: the largest number of training samples, for a quick trial
        root: where data sets are kept
        device: auto, cpu, cuda, …
        threads: of the CPU; by default OMP_NUM_THREADS, one for small networks, or the cores that this process may use
        quiet: show no progress

    """
    method_options = {"epochs": epochs, "prune": prune, "scope": scope, "extraction": extraction}
    arguments = {
        "head": head,
        "optimizer": optimizer,
        "rate": rate,
        "batch_size": batch_size,
        **{name: value for name, value in method_options.items() if value is not None},
        **(method_arguments or {}),
    }
    experiment = ContinualExperiment(
        dataset, model, method, seed, tasks, shuffle_labels, model_arguments or {}, arguments, limit
    )
    check_whole("--limit", 1 if limit is None else limit)
    prepared = prepare_continual(experiment, root=root, device=device, quiet=quiet)
    folder = out or Path("runs") / prepared.folder
    learner, example = prepared.learner, prepared.tasks[0].data.example()
    work = work_of_batch(learner.backbone, example, device, learner.recipe.batch_size)
    with threads_for_work(threads, work) as count:
        say(describe_sequence(prepared, folder, describe_device(device, learner.backbone, count)), quiet)
        done, new = run_prepared(prepared, folder)
    if not new:
        print(describe_finished_run(folder, done))
    show(method, done)
    print(f"\n{'it took ' * (not new)}{done['seconds']:.0f} s; see {folder}")
    print(suggest_commands(("report",), folder))
    return 0


def describe_sequence(prepared: PreparedSequence, folder: Path, device: str) -> str:
    """Say what is learned, on what, for how long, and where it is written."""
    experiment, learner, tasks = prepared.experiment, prepared.learner, prepared.tasks
    samples = sum(len(task.data.train) for task in tasks)
    lines = [
        f"learning  {counted(len(tasks), 'task')} of {experiment.dataset}: {counted(samples, 'sample')} "
        f"of shape {tasks[0].data.shape}, {' + '.join(str(task.data.num_classes) for task in tasks)} classes",
        f"by        {experiment.method} on {experiment.model}, seed {experiment.seed}",
        f"for       {counted(learner.recipe.epochs, 'epoch')} of each task, batches of {learner.recipe.batch_size}",
        f"with      {device}",
        f"into      {folder}",
    ]
    return "\n".join(map(escape_control_characters, lines))


def show(method: str, result: dict[str, Any]) -> None:
    """Print the accuracies, figures and memory of a continual run."""
    memory = result["memory"]
    print(rebuild_matrix(result).table())
    print()
    figure_rows = [(name.replace("_", " "), f"{100 * value:.2f} %") for name, value in result["figures"].items()]
    print(text_table(("", method), figure_rows))
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
    capacity = rebuild_capacity(result)
    if capacity is not None and not any(capacity.free.values()):
        print("\nno neuron is free any more: further tasks would learn their heads alone")

"""The kinds of file that the library reads: how one is made, and how it is read."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

import structured_ensembles as se
from structured_ensembles.continual import LEARNERS
from structured_ensembles.methods import METHODS

from . import world
from .count import CommandError

SEARCH = "checkpoint-search.safetensors"
DTYPES = ("float32", "float16", "int8")
Make = Callable[[Path], None]  # fills an empty folder
Read = Callable[[Path], str]  # reads what is in the folder; returns a fingerprint of what it tells


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    file: its name in the folder, as a pattern. form: what is forged in it, see `forge.FORGERIES`.
    sealed: it has a checksum, so that damage must never change a result. What users write themselves has none.
    per_round: how many cases a round has; fewer where reading takes long.
    slow: left out of a quick attack.
    """

    name: str
    file: str
    form: str
    make: Make
    read: Read
    sealed: bool = True
    per_round: int = 6
    slow: bool = False

    def path(self, folder: Path) -> Path:
        return sorted(folder.glob(self.file))[0]


# Ensembles and learners ----------------------------------------------------------------------------------------------


def _saved(method: str) -> Make:
    def make(folder: Path) -> None:
        ensemble = world.run_method(method, None)
        for dtype in DTYPES:
            ensemble.save(folder / f"{dtype}.safetensors", dtype)

    return make


def _ensembles(name: str, make: Make, dtypes: tuple[str, ...] = ("float32",)) -> list[Kind]:
    """Kinds of file that one specimen holds, an ensemble stored in several ways."""

    def reading(dtype: str) -> Read:
        return lambda folder: world.told_by(se.Ensemble.load(folder / f"{dtype}.safetensors"))

    files = [(f"ensemble-{name}-{dtype}", f"{dtype}.safetensors", reading(dtype)) for dtype in dtypes]
    return [Kind(kind, file, "container", make, read, per_round=20) for kind, file, read in files]


def _make_regression(folder: Path) -> None:
    pixels, labels = world.images()
    data = se.Data.from_arrays(pixels, 10.0 * labels[:, None] + 3)
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(16, num_classes=2, hidden=(6,)) for _ in range(2)])
    se.train(ensemble, data, world.RECIPE, "cpu", loss=se.gaussian_nll, quiet=True)
    ensemble.save(folder / "float32.safetensors")


def _learner(method: str) -> Kind:
    def make(folder: Path) -> None:
        learner = world.new_learner(method)
        for task in world.tasks():
            learner.learn(task)
        learner.save(folder / "l.safetensors")

    def read(folder: Path) -> str:
        return world.told_by_learner(LEARNERS[method].load(folder / "l.safetensors", device="cpu"))

    return Kind(f"learner-{method}", "l.safetensors", "container", make, read, per_round=12)


# Runs that were stopped ----------------------------------------------------------------------------------------------


def stop_at(number: int, name: str) -> None:
    """Raise KeyboardInterrupt in this process when the file `name` is written for the `number`-th time."""
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event == "os.rename" and Path(str(arguments[1])).name == name:
            count += 1
            if count == number:
                raise KeyboardInterrupt

    sys.addaudithook(hook)


def _stopped(run: Callable[[Path], object], name: str, number: int = 2) -> Make:
    def make(folder: Path) -> None:
        stop_at(number, name)
        try:
            run(folder)
        except KeyboardInterrupt:
            return
        raise AssertionError(f"the run has not written {name} {number} times")

    return make


def _checkpoint(method: str) -> Kind:
    def read(folder: Path) -> str:
        return world.told_by(world.run_method(method, folder))

    file = "checkpoint-1.safetensors" if method == "snapshot" else "checkpoint.safetensors"
    make = _stopped(lambda folder: world.run_method(method, folder), file)
    slow = method not in ("structured", "deep")
    return Kind(f"checkpoint-{method}", file, "container", make, read, per_round=5, slow=slow)


def _read_structured(folder: Path) -> str:
    return world.told_by(world.run_method("structured", folder))


def _sequence(folder: Path) -> str:
    learner = world.new_learner("pruning")
    matrix = se.continual.run_sequence(learner, world.tasks(), folder)
    return world.digest(world.told_by_learner(learner), matrix.to_dict())


# Data, and what the command line reads -------------------------------------------------------------------------------


def _load_data(folder: Path) -> str:
    return world.told_by_data(se.load_data("tiny", folder))


def _cache(folder: Path) -> None:
    _load_data(folder)


def _searched(folder: Path) -> None:
    """The neurons are chosen, and no epoch is trained yet."""
    _stopped(lambda own: world.run_method("structured", own), "checkpoint.safetensors", 1)(folder)


def _searching(folder: Path) -> None:
    """The search is in its second epoch."""
    _stopped(lambda own: world.run_method("structured", own), SEARCH)(folder)


def _run(folder: Path) -> None:
    """A finished run with everything that is measured of it, and the file of options that it can be given again by."""
    options = {"dataset": "tiny", "model": "mlp", "members": 2, "epochs": 2, "device": "cpu", "quiet": True}
    options |= {"model_arguments": {"hidden": [8, 6]}, "method_arguments": {"search_epochs": 2}}
    (folder / "options.yaml").write_text(json.dumps(options, indent=1))
    _train(folder)
    world.command("report", folder / "run", "--out", folder / "report", "--root", folder / "data", "--device", "cpu")


def _figures(printed: str) -> str:
    """Leave out what depends on the folder, the minute, and whether the run was finished before."""
    return "\n".join(line for line in printed.splitlines() if not re.search("size/peak|see |done|finished|Next", line))


def _train(folder: Path) -> str:
    return _figures(world.command(*world.TRAIN, "--root", folder / "data", "--out", folder / "run"))


def _train_by_options(folder: Path) -> str:
    """An option that damage has changed is another run than that in the folder, which is refused."""
    own = ("--root", folder / "data", "--out", folder / "run")
    return _figures(world.command("train", "--config", folder / "options.yaml", *own))


def _evaluate(folder: Path) -> str:
    told = world.command("evaluate", folder / "run", "--root", folder / "data", "--device", "cpu")
    return _figures(told)


def _report(folder: Path) -> str:
    world.command("report", folder / "run", "--out", folder / "report", "--root", folder / "data", "--device", "cpu")
    texts = [path.read_text() for path in sorted((folder / "report").rglob("*.*")) if path.suffix in (".md", ".svg")]
    return world.digest(*texts)


READS: dict[str, Read] = {
    "train": _train,
    "options": _train_by_options,
    "evaluate": _evaluate,
    "report": _report,
}


def _of_run(file: str, form: str, command: str, per_round: int) -> Kind:
    slow = command == "report"
    return Kind(f"{file}-{command}", f"run/{file}", form, _run, READS[command], per_round=per_round, slow=slow)


def _continual(folder: Path) -> str:
    own = ("--root", folder / "data", "--out", folder / "run", "--method", "pruning")
    return _figures(world.command(*world.CONTINUAL, *own))


def _continual_made(folder: Path) -> None:
    _continual(folder)


def _pictures(folder: Path) -> None:
    world.run_method("deep", None).save(folder / "e.safetensors")
    pixels = world.images()[0]
    for number in range(2):
        Image.fromarray(pixels[number, 0].numpy()).resize((32, 32)).save(folder / f"picture-{number}.png")


def _predict(folder: Path) -> str:
    """One of two pictures is damaged: the other must be classified whatever happens."""
    paths = [folder / f"picture-{number}.png" for number in range(2)]
    try:
        return world.command("predict", folder / "e.safetensors", *paths).replace(str(folder), "")
    except CommandError as error:
        if paths[1].name not in error.printed:
            raise RuntimeError("the other picture was not classified") from error
        raise


_sequence_made = _stopped(_sequence, "learner.safetensors")
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *_ensembles("structured", _saved("structured"), DTYPES),
        *_ensembles("deep", _saved("deep")),
        *_ensembles("batch-ensemble", _saved("batch-ensemble")),
        *_ensembles("mc-dropout", _saved("mc-dropout")),
        *_ensembles("regression", _make_regression),
        *map(_learner, LEARNERS),
        *map(_checkpoint, METHODS),
        Kind("data-cache", "tiny.safetensors", "container", _cache, _load_data, per_round=15),
        Kind("checkpoint-search", SEARCH, "container", _searching, _read_structured, per_round=5, slow=True),
        Kind("subnets.json", "subnets.json", "json", _searched, _read_structured, per_round=4),
        Kind("identity.json", "identity.json", "json", _searched, _read_structured, per_round=4),
        Kind("sequence-learner", "learner.safetensors", "container", _sequence_made, _sequence),
        Kind("sequence-matrix.json", "matrix.json", "json", _sequence_made, _sequence),
        _of_run("config.yaml", "yaml", "train", 5),
        _of_run("config.yaml", "yaml", "evaluate", 4),
        _of_run("config.yaml", "yaml", "report", 1),
        _of_run("result.json", "json", "train", 5),
        _of_run("result.json", "json", "report", 1),
        _of_run("evaluation-test-mean.json", "json", "evaluate", 2),
        _of_run("evaluation-test-mean.json", "json", "report", 1),
        _of_run("samples.safetensors", "container", "report", 1),
        _of_run("history.csv", "csv", "report", 1),
        _of_run("subnets.json", "json", "report", 1),
        _of_run("ensemble.safetensors", "container", "evaluate", 2),
        Kind("options.yaml", "options.yaml", "options", _run, READS["options"], sealed=False, per_round=5),
        Kind("continual-result.json", "run/result.json", "json", _continual_made, _continual, per_round=3, slow=True),
        Kind("picture", "picture-0.png", "bytes", _pictures, _predict, sealed=False, per_round=4),
    )
}


def fresh(specimen: Path, scratch: Path) -> Path:
    """Copy a specimen's folder to the scratch folder, which is emptied."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(specimen, scratch)
    return scratch

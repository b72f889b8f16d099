"""Damaged and forged files of a run folder: every reader says so, whatever stands where."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from structured_ensembles.cli.main import main
from structured_ensembles.report.collected import _history, _subnets, read_run
from structured_ensembles.report.continual_collected import read_continual_run
from structured_ensembles.report.page import _row
from structured_ensembles.runs import read_samples

WRONG = (None, "x", [], {}, -1, True, float("inf"), float("nan"), 10**400, [[1]], {"a": {"b": 1}})
TRAIN = ["--model", "mlp", "--epochs", "2", "--members", "2", "--quiet"]
CONTINUAL = ["--method", "structured", "--method-arguments", '{"search_epochs": 1}', "--tasks", "2", "--epochs", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a run of each kind, measured."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", "--out", str(folder / "train"), *TRAIN]) == 0
    assert main(["report", str(folder / "train"), "--out", str(folder / "report")]) == 0
    assert main(["continual", "--out", str(folder / "continual"), *CONTINUAL, "--quiet"]) == 0
    return {"train": folder / "train", "continual": folder / "continual"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the paths to every value in nested dicts and lists; of long lists, to the first few."""
    few = range(min(len(value), 3)) if isinstance(value, list) else ()
    for key in value if isinstance(value, dict) else few:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Copy a value with another one at a path; `...` deletes it."""
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return whole


FILES = [
    ("train", "config.yaml"),
    ("train", "result.json"),
    ("train", "evaluation-test-mean.json"),
    ("train", "subnets.json"),
    ("continual", "config.yaml"),
    ("continual", "result.json"),
]


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_whatever_stands_in_a_file_it_is_read_or_said_to_be_damaged(
    kind: str, name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[kind], folder)
    path = folder / name
    text = path.read_text()
    whole = yaml.safe_load(text) if name.endswith("yaml") else json.loads(text)
    wrongs = [(place, new) for place in places(whole) for new in (..., *WRONG)]
    damaged = 0
    for place, new in random.Random(0).sample(wrongs, min(len(wrongs), 100)):
        other = changed(whole, place, new)
        path.write_text(yaml.safe_dump(other) if name.endswith("yaml") else json.dumps(other))
        try:
            found = read_run(folder) if kind == "train" else read_continual_run(folder)
            assert all(isinstance(own, str) for own in _row(found).values())
            assert isinstance(found.label + found.place + found.precision, str)
            if name == "subnets.json":
                _subnets(path)
        except ValueError as error:
            assert "is damaged" in str(error), (place, new)  # noqa: PT017
            damaged += 1
    assert damaged > len(wrongs[:100]) / 10  # or nothing was checked


@pytest.mark.parametrize(
    ("kind", "name", "place", "new"),
    [
        ("train", "result.json", ("seconds",), ...),
        ("train", "result.json", ("figures", "cls/accuracy"), "high"),
        ("train", "config.yaml", ("method_arguments",), [1]),
        ("train", "config.yaml", ("model_arguments",), {"num_classes": "many"}),
        ("train", "evaluation-test-mean.json", ("figures", "size/members"), 1e12),
        ("train", "subnets.json", (0, 0, "kept", 0), 10**6),
        ("continual", "result.json", ("matrix", "rows"), [[0.5], [1]]),
        ("continual", "result.json", ("memory",), ...),
    ],
)
def test_a_damaged_file_is_a_sentence_on_the_command_line(
    kind: str, name: str, place: tuple[Any, ...], new: Any,
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    shutil.copytree(runs[kind], folder)
    path = folder / name
    whole = yaml.safe_load(path.read_text()) if name.endswith("yaml") else json.loads(path.read_text())
    other = changed(whole, place, new)
    path.write_text(yaml.safe_dump(other) if name.endswith("yaml") else json.dumps(other))
    commands = [["report", str(folder), "--out", str(tmp_path / "report")]]
    if name == "result.json":  # which is read again by the command that wrote it
        commands.append([kind, "--out", str(folder), *(TRAIN if kind == "train" else CONTINUAL)])
    if place[0] == "model_arguments":
        commands = [["evaluate", str(folder)]]
    for command in commands:
        capsys.readouterr()
        assert main(command) == 2
        shown = capsys.readouterr().err
        assert "damaged" in shown or "cannot be made with" in shown or "must be" in shown
        assert shown.count("\n") == 1


def test_a_damaged_history_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    whole = (runs["train"] / "history.csv").read_text()
    path = tmp_path / "history.csv"
    path.write_text(whole)
    assert len(_history(path)) == 4
    for row in ("zero,", ",", "1e999,", "0.5,", "0,1,"):
        path.write_text(whole.replace("\n0,", "\n" + row, 1))
        with pytest.raises(ValueError, match="is damaged"):
            _history(path)
    for header in ("epoche,", "epoch,epoch,", ""):
        path.write_text(whole.replace("epoch,", header, 1))
        with pytest.raises(ValueError, match="is damaged"):
            _history(path)


def test_damaged_samples_are_left_out(runs: dict[str, Path], tmp_path: Path) -> None:
    whole = load_file(runs["train"] / "samples.safetensors")
    path = tmp_path / "samples.safetensors"
    save_file(whole, path)
    assert read_samples(tmp_path).keys() == whole.keys()
    entropy = whole["entropy"]
    for name, tensor in (
        ("entropy", None), ("entropy", entropy[:3].clone()), ("entropy", entropy / 0), ("entropy", entropy[None] + 0),
        ("correct", whole["correct"].float()), ("disagreement", torch.zeros(2)), ("disagreement", torch.zeros(2, 3)),
        ("confidence", torch.tensor(1.0)),
    ):  # fmt: skip
        changes = {key: value for key, value in {**whole, name: tensor}.items() if value is not None}
        save_file(changes, path)
        with pytest.warns(UserWarning, match="is damaged"):
            assert read_samples(tmp_path) == {}

"""Default run folders: named by every given argument, not by defaults; arguments are checked first."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.continual.experiment import ContinualExperiment, prepare_continual
from structured_ensembles.methods import METHODS
from structured_ensembles.runs.experiment import Experiment, prepare_experiment
from structured_ensembles.runs.settings import USUAL_PRUNE, make_folder_name

TRAIN = ["train", "--model", "mlp", "--method", "random", "--members", "2", "--quiet", "true"]


def folder_of(method: str = "structured", model: str = "mlp", **settings: Any) -> str:
    return prepare_experiment(Experiment("digits", model, method, **{"recipe": "auto", **settings})).folder


def continual_folder_of(method: str = "structured", **settings: Any) -> str:
    return prepare_continual(ContinualExperiment("digits", "lenet5", method, **settings)).folder


def test_default_folder_name_depends_on_every_given_argument() -> None:
    names = [
        folder_of(),
        folder_of(method_arguments={"prune": 0.3}),
        folder_of(method_arguments={"memory": 0.5}),
        folder_of(method_arguments={"scope": "network"}),
        folder_of(method_arguments={"initial": "N(0,2)"}),
        folder_of(method_arguments={"strength": 0.2}),
        folder_of(method_arguments={"rescale": True}),
        folder_of(model_arguments={"hidden": [16, 16]}),
        folder_of(model_arguments={"hidden": [1, 6, 16]}),
        folder_of(changes={"epochs": 3}),
        folder_of(changes={"rate": 0.01}),
        folder_of(changes={"milestones": [3, 4]}),
        folder_of(recipe="paper"),
        folder_of(storage="int8"),
        folder_of(limit=100),
        folder_of(members=3),
        folder_of(seed=3),
        folder_of("deep"),
        folder_of(model="lenet5"),
    ]
    assert len(set(names)) == len(names)
    assert names[0] == "digits-mlp-structured-0"
    assert names[1] == "digits-mlp-structured-prune=0.3-0"
    assert all(len(name) < 200 and name == Path(name).name and name.isascii() for name in names)
    continual = [
        continual_folder_of(),
        continual_folder_of(tasks=2),
        continual_folder_of(shuffle_labels=True),
        continual_folder_of(limit=100),
        continual_folder_of(seed=1),
        continual_folder_of("naive"),
        continual_folder_of(method_arguments={"prune": 0.3}),
        continual_folder_of(method_arguments={"epochs": 3}),
        continual_folder_of(method_arguments={"head": "paper"}),
    ]
    assert len({*continual, *names}) == len(continual) + len(names)
    assert continual[0] == "continual-digits-lenet5-structured-0"


def test_explicit_default_is_the_same_run() -> None:
    explicit = {"prune": 0.5, "scope": "layer", "selection": "learned", "strength": 0.1, "round_to": 1.0}
    assert folder_of(method_arguments=explicit) == folder_of()
    assert folder_of(method_arguments={"memory": None}) == folder_of()
    assert folder_of("random", method_arguments={"prune": 0.5, "selection": "random"}) == folder_of("random")
    assert folder_of("random", method_arguments={"selection": "learned"}) != folder_of("random")
    for recipe in ("auto", "modern"):
        assert folder_of(recipe=recipe, changes={"epochs": 60, "milestones": []}) == folder_of()
    assert folder_of(model_arguments={"num_classes": 10, "in_features": 64}) == folder_of()
    assert folder_of("batch_ensemble") == folder_of("batch-ensemble")
    explicit = {"prune": 0.5, "epochs": 30, "rate": 1e-3, "head": "linear", "batch_size": 128, "search_epochs": 10}
    assert continual_folder_of(method_arguments=explicit, tasks=5) == continual_folder_of()
    assert folder_of(method_arguments={"round_to": 1}) == folder_of()
    assert folder_of(method_arguments={"coupled": 0}) != folder_of()  # a method need not treat 0 as False


def test_unprintable_and_long_values_give_distinct_folder_names() -> None:
    names = [
        make_folder_name(["digits", "mlp"], {"a": value}, 0) for value in ("x/y", "x.y", "x y", "../x", "é", "z" * 300)
    ]
    names.append(make_folder_name(["digits", "mlp"], {"a": "z" * 301}, 0))
    assert len(set(names)) == len(names)
    assert all(len(name) < 200 and "/" not in name for name in names)


@pytest.mark.parametrize("method", ["structured", "random", "magnitude", "narrow"])
def test_usual_prune_is_the_default_of_the_methods(method: str) -> None:
    data = se.load_data("digits")
    sizes = []
    for arguments in ({}, {"prune": USUAL_PRUNE}):
        torch.manual_seed(0)
        search = {"selection": "random"} if method == "structured" else {}
        recipe = se.Recipe(epochs=0)
        made = METHODS[method](se.zoo.mlp(64), data, members=1, recipe=recipe, quiet=True, **search, **arguments)
        sizes.append([tuple(parameter.shape) for parameter in made.members[0].parameters()])
    assert sizes[0] == sizes[1] != [tuple(parameter.shape) for parameter in se.zoo.mlp(64).parameters()]


def test_commands_with_other_options_use_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--epochs", "1", "--prune", "0.3"]) == 0
    assert main([*TRAIN, "--epochs", "1", "--prune", "0.5"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2
    capsys.readouterr()
    assert main([*TRAIN, "--epochs", "1", "--scope", "layer", "--recipe", "modern"]) == 0  # as without them
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if "prune" not in path.name]
    date = json.loads((folder / "result.json").read_text())["date"]
    shown = capsys.readouterr().out
    assert f"runs/{folder.name} is done already: it was finished on {date.replace('T', ' at ')}" in shown
    assert "nothing was trained now" in shown


def test_arguments_are_checked_before_folders_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main([*TRAIN, "--epochs", "0", *out]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    for wrong, message in (
        (["--prune", "1.5"], "prune must be at least 0 and less than 1, not 1.5"),
        (["--prune", "0.5", "--memory", "1"], "prune and memory exclude each other"),
        (["--method_arguments", '{"placement": "nowhere"}'], "placement must be one of 'output', 'norm'"),
        (["--method_arguments", '{"pune": 0.5}'], "method 'random' has no argument 'pune': it has"),
        (["--method_arguments", '{"members": 3}'], "method 'random' has no argument 'members': it has"),
        (["--method", "single", "--prune", "0.5"], "method 'single' has no argument 'prune': it has"),
        (["--members", "0"], "members must be a whole number of at least 1"),
        (["--device", "cuda"], "device must be"),
        (["--model_arguments", '{"depth": 3}'], "model 'mlp' takes the arguments"),
    ):
        capsys.readouterr()
        assert main([*TRAIN, "--epochs", "0", *wrong, *out]) == 2
        assert message in capsys.readouterr().err
        assert main([*TRAIN, "--epochs", "0", *wrong, "--out", str(tmp_path / "new")]) == 2
        assert not (tmp_path / "new").exists()
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}


def test_runs_recorded_with_or_without_defaults_are_equal(tmp_path: Path) -> None:
    from structured_ensembles.runs.experiment import train_experiment

    plain = Experiment("digits", "mlp", "random", members=1, changes={"epochs": 0})
    full = Experiment("digits", "mlp", "random", members=1, changes={"epochs": 0}, method_arguments={"prune": 0.5})
    other = Experiment("digits", "mlp", "random", members=1, changes={"epochs": 0}, method_arguments={"prune": 0.4})
    assert train_experiment(full, tmp_path / "run", quiet=True)[1]
    assert not train_experiment(plain, tmp_path / "run", quiet=True)[1]
    with pytest.raises(ValueError, match="holds a run with another prune:"):
        train_experiment(other, tmp_path / "run", quiet=True)


def test_resolved_settings_have_the_defaults_and_what_was_given() -> None:
    given = {"memory": 1.0, "diversity": None}
    resolved = prepare_experiment(Experiment("digits", "mlp", "structured", method_arguments=given)).resolved
    arguments = resolved["method_arguments"]
    assert arguments.items() >= {**given, "initial": "N(0,1)", "selection": "learned", "trained": "auto"}.items()
    assert not arguments.keys() & {"prune", "members", "seed", "device", "folder", "recipe", "loss", "on_epoch"}
    sequence = prepare_continual(ContinualExperiment("digits", "lenet5", "structured", tasks=5))
    resolved = sequence.defaults.resolved(sequence.experiment.config())
    assert resolved["method_arguments"].items() >= {"prune": 0.5, "extraction": "hard", "search_epochs": 10}.items()
    assert resolved["method_arguments"]["epochs"] == sequence.learner.settings["epochs"]

"""Code that a run folder names is imported only for callers who trust it or name the same function."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.runs.experiment import Experiment, train_experiment
from structured_ensembles.runs.ingredients import load_run_ensemble
from structured_ensembles.runs.measurement import Request, measure_experiment
from structured_ensembles.zoo.by_name import is_trusted

STRANGER = """
import pathlib
pathlib.Path(__file__).with_name("imported").touch()

def data():
    import structured_ensembles as se
    return se.load_data("digits")

def network(**arguments):
    import structured_ensembles as se
    return se.zoo.mlp(64)

method = learner = network
"""


@pytest.fixture(scope="module")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_experiment(Experiment("digits", "mlp", "single", changes={"epochs": 1}), folder / "single", quiet=True)
    command = ["continual", "--tasks", "2", "--epochs", "1", "--method", "naive", "--quiet", "true"]
    assert main([*command, "--out", str(folder / "continual")]) == 0
    return folder


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Write a module into the current folder; tell whether it was imported."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    return (tmp_path / "imported").exists


def forged(run: Path, tmp_path: Path, **changes: object) -> Path:
    folder = tmp_path / "forged"
    shutil.copytree(run, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, **changes}))
    return folder


CHANGES = [
    {"dataset": "stranger:data"},
    {"model": "stranger:network"},
    {"dataset": "stranger:data", "model": "stranger:network", "method": "stranger:method"},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("command", ["evaluate", "report", "measure_experiment"])
def test_untrusted_functions_of_a_run_folder_are_not_imported(
    command: str,
    changes: dict[str, str],
    trained_runs: Path,
    tmp_path: Path,
    stranger: Callable[[], bool],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = forged(trained_runs / "single", tmp_path, **changes)
    if command == "measure_experiment":
        with pytest.raises(se.ArtifactError) as refusal:
            measure_experiment(folder, Request(), device="cpu")
        message = str(refusal.value)
    else:
        assert main([command, str(folder)]) == 2
        message = capsys.readouterr().err
    assert not stranger()
    wanted = [f"{changes[argument]!r} for its {argument}" for argument in ("dataset", "model") if argument in changes]
    assert f"config.yaml asks to import {' and '.join(wanted)}:" in message
    assert "--trust-code" in message


@pytest.mark.parametrize("run", ["single", "continual"])
def test_report_of_measured_runs_imports_nothing(
    run: str, trained_runs: Path, tmp_path: Path, stranger: Callable[[], bool]
) -> None:
    folder = forged(trained_runs / run, tmp_path, **CHANGES[-1])
    assert main(["report", str(folder), "--measure", "false", "--out", str(tmp_path / "report")]) == 0
    assert not stranger()


def test_evaluate_never_imports_the_method(trained_runs: Path, tmp_path: Path, stranger: Callable[[], bool]) -> None:
    folder = forged(trained_runs / "single", tmp_path, method="stranger:method")
    assert main(["evaluate", str(folder)]) == 0
    assert not stranger()


def test_continual_folder_of_another_configuration_imports_nothing(
    trained_runs: Path, tmp_path: Path, stranger: Callable[[], bool]
) -> None:
    folder = forged(trained_runs / "continual", tmp_path, **CHANGES[-1])
    assert main(["continual", "--tasks", "2", "--method", "naive", "--out", str(folder)]) == 2
    assert main(["evaluate", str(folder)]) == 2
    assert not stranger()


def test_trust_code_imports_the_functions_of_a_run_folder(
    trained_runs: Path, tmp_path: Path, stranger: Callable[[], bool]
) -> None:
    folder = forged(trained_runs / "single", tmp_path, dataset="stranger:data")
    assert main(["evaluate", str(folder), "--trust_code", "true"]) == 0
    assert stranger()


def test_function_named_in_the_same_command_is_trusted(
    trained_runs: Path, tmp_path: Path, stranger: Callable[[], bool]
) -> None:
    folder = forged(trained_runs / "single", tmp_path, dataset="stranger:data")
    assert main(["evaluate", str(folder), "--ood", "os:getcwd"]) == 2  # another function than the folder's
    assert not stranger()
    assert main(["evaluate", str(folder), "--ood", "stranger:data"]) == 0
    assert stranger()


def test_only_functions_named_by_the_caller_are_trusted(
    trained_runs: Path, tmp_path: Path, stranger: Callable[[], bool]
) -> None:
    folder = forged(trained_runs / "single", tmp_path, **CHANGES[-1])
    with pytest.raises(se.ArtifactError, match="asks to import 'stranger:network' for its model: "):
        measure_experiment(folder, Request(), device="cpu", trust_code=["stranger:data"])
    assert not stranger()
    figures, _ = measure_experiment(folder, Request(), device="cpu", trust_code=["stranger:data", "stranger:network"])
    assert figures["size/overhead"] == 1.0


def test_run_with_a_user_network_loads_if_that_function_is_trusted(
    tmp_path: Path, stranger: Callable[[], bool]
) -> None:
    network = se.from_factory("stranger:network")
    se.Ensemble([network]).save(tmp_path / "ensemble.safetensors")
    config, data = {"dataset": "digits", "model": "stranger:network", "model_arguments": {}}, se.load_data("digits")
    for trusted in (True, ["stranger:network"]):
        loaded = load_run_ensemble(tmp_path, config, data, trusted)
        assert torch.equal(loaded.members[0].state_dict()["layers.1.weight"], network.state_dict()["layers.1.weight"])
    with pytest.raises(se.ArtifactError, match="asks to import 'stranger:network' for its model"):
        load_run_ensemble(tmp_path, config, data, ["stranger:data"])


def test_trust_compares_whole_names() -> None:
    assert is_trusted("mlp", False)
    assert not is_trusted("a:b", False)
    assert not is_trusted("a:b", "a:bc")  # a string is one name
    assert is_trusted("a:b", "a:b")
    assert is_trusted("a:b", ("a:b",))
    assert is_trusted("a:b", True)
    assert not is_trusted("a:b", ())

"""`sens train`: a complete run folder, resumed or refused; own code, regressions, recipes and storage."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.cli.train import describe_training
from structured_ensembles.runs.experiment import Experiment, prepare_experiment
from tests.support.command_lines import QUICK


def my_network(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def my_data() -> se.Data:
    return se.load_data("digits")


def my_method(model: nn.Module, data: se.Data, **settings: object) -> se.Ensemble:
    """Train a plain ensemble, as a method outside of the package."""
    return se.methods.single_network(model, data, recipe=settings["recipe"], seed=settings["seed"], quiet=True)


def no_test() -> se.Data:
    return se.Data.from_arrays(np.zeros((40, 1, 8, 8), np.uint8), np.arange(40) % 10)


def sums() -> se.Data:
    x = np.random.default_rng(0).random((60, 5), dtype=np.float32)
    return se.Data.from_arrays(x, x.sum(1), test=(x[:20], x[:20].sum(1)))


def my_numbers() -> se.Data:
    x = torch.rand(200, 6, generator=torch.Generator().manual_seed(0))
    return se.Data.from_arrays(x, x.sum(1), test=(x, x.sum(1)))


def my_regressor(**_: object) -> nn.Module:
    return se.zoo.mlp(6, 1)


def test_train_writes_a_complete_run_folder_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {path.name for path in run.iterdir()}
    kept = {"config.yaml", "identity.json", "subnets.json"}
    assert files == kept | {"result.json", "history.csv", "ensemble.safetensors"}
    result = json.loads((run / "result.json").read_text())
    data = se.load_data("digits")
    ensemble = se.Ensemble.load(run / "ensemble.safetensors")
    assert se.evaluate(ensemble, data)["cls/accuracy"] == pytest.approx(result["figures"]["cls/accuracy"])
    assert {"device", "versions", "seconds", "date", "file_bytes"} <= result.keys()
    assert (run / "history.csv").read_text().splitlines()[0].startswith("epoch,member,rate,loss")
    assert len((run / "history.csv").read_text().splitlines()) == 1 + 2 * 2
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["model"], config["method_arguments"]) == ("mlp", {})  # by which runs are compared
    resolved = result["resolved"]
    assert resolved["method_arguments"].items() >= {"prune": 0.5, "scope": "layer", "search_epochs": 10}.items()
    assert resolved["model_arguments"] == {"in_features": 64, "num_classes": 10, "hidden": [256, 256]}
    assert resolved["recipe"] == se.Recipe.named("modern", epochs=2).to_dict()
    assert resolved["execution"] == se.Execution().to_dict()
    before = (run / "ensemble.safetensors").stat().st_mtime_ns
    assert main(["train", "--out", str(run), *QUICK]) == 0
    assert "done already" in capsys.readouterr().out
    assert (run / "ensemble.safetensors").stat().st_mtime_ns == before


def test_train_refuses_a_folder_of_another_configuration_or_of_other_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(run), *QUICK, "--seed", "3"]) == 2
    assert "holds a run with another seed" in capsys.readouterr().err
    assert main(["train", "--out", str(run), *QUICK, "--epochs", "9"]) == 2
    assert "holds a run with another epochs:" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    assert main(["train", "--out", str(tmp_path / "mine"), *QUICK]) == 2
    assert "not empty and not a run folder" in capsys.readouterr().err


def test_interrupted_run_resumes_to_the_same_result(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.training.loop_engine import LoopEngine

    original, broken = LoopEngine.train_epoch, tmp_path / "broken"

    def interrupted(self: LoopEngine, active: Any, epoch: int, advance: Any) -> list[float]:
        if epoch == 1:
            raise KeyboardInterrupt
        return original(self, active, epoch, advance)

    monkeypatch.setattr(LoopEngine, "train_epoch", interrupted)
    assert main(["train", "--out", str(broken), *QUICK]) == 130
    assert (broken / "checkpoint.safetensors").exists()
    monkeypatch.setattr(LoopEngine, "train_epoch", original)
    assert main(["train", "--out", str(broken), *QUICK]) == 0
    assert (broken / "ensemble.safetensors").read_bytes() == (run / "ensemble.safetensors").read_bytes()


def test_run_interrupted_in_its_search_resumes_the_search(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from structured_ensembles.search import _Search

    original, epochs = _Search.epoch, []

    def interrupted(self: _Search, feed: Any, seed: Any, learn: bool, **more: Any) -> float:
        epochs.extend([seed] * learn)
        if len(epochs) == 9:
            raise KeyboardInterrupt
        return original(self, feed, seed, learn, **more)

    monkeypatch.setattr(_Search, "epoch", interrupted)
    command = ["train", "--out", str(tmp_path / "broken"), *QUICK]
    assert main(command) == 130
    assert main(command) == 0
    assert len(epochs) == 9 + 2  # eight of the ten epochs were done before
    files = [{path.name for path in folder.iterdir()} for folder in (run, tmp_path / "broken")]
    assert files[0] == files[1]
    assert (tmp_path / "broken" / "ensemble.safetensors").read_bytes() == (run / "ensemble.safetensors").read_bytes()


def test_invalid_arguments_create_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, start = tmp_path / "run", ["train", "--model", "mlp", "--epochs", "1", "--members", "2", "--quiet"]
    wrongs = (
        ["--prune", "1.5"],
        ["--memory", "1e-4"],
        ["--device", "cuda"],
        ["--dataset", "tests.cli.test_train:no_test"],
    )
    for wrong in wrongs:
        assert main([*start, *wrong, "--out", str(out)]) == 2
        assert not out.exists()
    shown = capsys.readouterr().err
    assert "memory=0.0001 is too little for 2 members" in shown
    assert "has no test split" in shown
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_train_and_report_work_for_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "--dataset", "tests.cli.test_train:sums", *QUICK, "--out", out]) == 0
    assert main(["report", out, "--out", str(tmp_path / "report"), "--trust_code", "true"]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    rmse = json.loads((tmp_path / "run" / "result.json").read_text())["figures"]["reg/rmse"]
    assert f"{rmse:.4f}" in text
    assert main(["report", out, "--out", str(tmp_path / "again")]) == 0  # all is measured: no data, no code to trust
    assert main(["train", "--dataset", "os:getcwd", *QUICK, "--out", str(tmp_path / "other")]) == 2
    assert "os:getcwd must give a Data, not a str" in capsys.readouterr().err


def test_int8_storage_records_figures_before_and_after(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "small"
    assert main(["train", "--out", str(folder), *QUICK, "--storage", "int8"]) == 0
    assert "as stored, in int8" in capsys.readouterr().out
    result = json.loads((folder / "result.json").read_text())
    full = json.loads((run / "result.json").read_text())
    assert result["figures_in_float32"] == full["figures"]
    assert result["figures"]["cls/accuracy"] == pytest.approx(full["figures"]["cls/accuracy"], abs=0.02)
    assert result["figures"]["cal/nll"] != full["figures"]["cal/nll"]
    assert result["file_bytes"] < 0.5 * full["file_bytes"]


def test_user_models_data_and_methods_need_no_registration(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    arguments = [
        "--model",
        "tests.cli.test_train:my_network",
        "--model_arguments",
        '{"width": 20}',
        "--dataset",
        "tests.cli.test_train:my_data",
    ]
    assert main(["train", "--out", str(folder), *arguments, "--epochs", "1", "--members", "2", "--quiet", "true"]) == 0
    assert main(["evaluate", str(folder)]) == 2  # the file names code to import
    assert main(["evaluate", str(folder), "--trust_code", "true"]) == 0
    other = ["--method", "tests.cli.test_train:my_method", "--model", "mlp", "--epochs", "1"]
    assert main(["train", "--out", str(tmp_path / "method"), *other]) == 0


def test_default_recipe_follows_the_task(tmp_path: Path) -> None:
    numbers = ["--dataset", "tests.cli.test_train:my_numbers", "--model", "tests.cli.test_train:my_regressor"]
    kinds = {"regression": numbers, "modern": ["--model", "mlp"], "paper": ["--model", "mlp", "--recipe", "paper"]}
    for name, arguments in kinds.items():
        folder = tmp_path / name
        assert main(["train", "--out", str(folder), *arguments, "--epochs", "2", "--members", "2"]) == 0
        assert yaml.safe_load((folder / "config.yaml").read_text())["recipe"] == name


def test_one_network_is_announced_as_one_member() -> None:
    prepared = prepare_experiment(Experiment("digits", "mlp", "single"), device="cpu")
    assert ", 1 member, seed 0" in describe_training(prepared, Path("run"), "the CPU")


def test_train_says_what_it_does_and_limit_bounds_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", "mlp", "--epochs", "2", "--members", "3", "--method", "deep", "--limit", "200"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    parameters = sum(parameter.numel() for parameter in se.zoo.mlp(64).parameters())
    assert f"training  deep of mlp ({parameters:,} parameters), 3 members, seed 0" in said
    assert re.search(r"on +digits: 200 samples of shape \(1, 8, 8\), \d+ to validate, \d+ to test", said)
    assert re.search(r"for +2 epochs, 4 steps of 128 samples for each member, by the recipe modern", said)
    assert "the CPU, 1 thread\n" in said
    assert f"into      {tmp_path / 'run'}" in said
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["limit"] == 200
    assert main([*words, "--out", str(tmp_path / "quiet"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""

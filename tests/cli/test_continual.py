"""`sens continual` from the command line to its run folder and report."""

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.main import main

CONTINUAL = ["continual", "--epochs", "2", "--batch_size", "64", "--quiet", "true"]


def my_data() -> se.Data:
    return se.load_data("digits")


def my_backbone(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())


def test_continual_writes_a_complete_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    command = [*CONTINUAL, "--out", str(folder), "--prune", "0.6", "--method_arguments", '{"search_epochs": 1}']
    assert main(command) == 0
    shown = capsys.readouterr().out
    files = {path.name for path in folder.iterdir()}
    pictures = {"accuracy.png", "capacity.png"}
    assert files == {"config.yaml", "result.json", "matrix.json", "learner.safetensors", *pictures}
    result = json.loads((folder / "result.json").read_text())
    learner = se.continual.StructuredLearner.load(folder / "learner.safetensors")
    assert list(learner.learned) == [0, 1, 2, 3, 4]
    assert (learner.prune, learner.search_epochs, learner.recipe.epochs) == (0.6, 1, 2)
    tasks = se.continual.load_tasks("digits")
    accuracies = [se.evaluate(learner.ensemble(task.number), task.data)["cls/accuracy"] for task in tasks]
    assert result["figures"]["final_accuracy"] == pytest.approx(sum(accuracies) / 5)
    assert result["matrix"]["rows"][-1] == pytest.approx(accuracies)
    assert f"{100 * sum(accuracies) / 5:.2f} %" in shown
    assert result["memory"]["masks"] == 5 * 142
    for name in pictures:
        with Image.open(folder / name) as picture:
            assert picture.size[0] > 300
    assert main(command) == 0
    assert "done already" in capsys.readouterr().out
    for other in (["evaluate", str(folder)], ["export", str(folder), "--onnx", str(tmp_path / "a.onnx")]):
        assert main(other) == 2
        assert "run of sens train: it has no ensemble.safetensors, as it is a run of sens continual" in (
            capsys.readouterr().err
        )


def test_continual_accepts_user_models_and_reports_invalid_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_options = [
        "--model",
        "tests.cli.test_continual:my_backbone",
        "--dataset",
        "tests.cli.test_continual:my_data",
        "--method",
        "batch-ensemble",
    ]
    assert main([*CONTINUAL, "--out", str(tmp_path / "a"), *user_options, "--tasks", "2"]) == 0
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["tasks"] == 2
    for arguments, message in (
        (user_options, "tasks must be given for 'tests.cli.test_continual:my_data', by sens continual --tasks"),
        (["--dataset", "imagenet"], "dataset must be one of 'digits', 'mnist'"),
        (["--limit", "3"], "has no samples to learn from"),
        (["--tasks", "3"], "tasks must divide the 10 classes"),
        (["--model", "vgg16"], "model must be one of half_vgg11, lenet5"),
        (["--method", "naive", "--prune", "0.5"], "'naive' has no argument 'prune'"),
        (["--method", "rehearsal"], "method must be one of naive, single"),
    ):
        capsys.readouterr()
        assert main([*CONTINUAL, "--out", str(tmp_path / "b"), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_report_compares_continual_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(tmp_path / method) for method in ("naive", "structured")]
    for method, folder in zip(("naive", "structured"), folders, strict=True):
        method_options = ["--method_arguments", '{"search_epochs": 1}'] if method == "structured" else []
        assert main([*CONTINUAL, "--method", method, "--tasks", "2", "--out", folder, *method_options]) == 0
    capsys.readouterr()
    assert main(["report", *folders, "--out", str(tmp_path / "report")]) == 0
    shown = capsys.readouterr().out
    for method, folder in zip(("naive", "structured"), folders, strict=True):
        figures = json.loads((Path(folder) / "result.json").read_text())["figures"]
        row = next(line for line in shown.splitlines() if line.startswith(f"| {method}"))
        assert f"{100 * figures['accuracy']:.2f}" in row
        assert f"{100 * figures['final_accuracy']:.2f}" in row
    names = {path.stem for path in (tmp_path / "report" / "figures").glob("*.svg")}
    assert names == {f"digits-lenet5-{name}" for name in ("memory", "matrix-naive", "matrix-structured", "capacity")}
    (tmp_path / "other").mkdir()
    small = "dataset: digits\nmodel: mlp\nmethod: single\nseed: 0\nmodel_arguments: {}\nmethod_arguments: {}\n"
    (tmp_path / "other" / "config.yaml").write_text(small)
    assert main(["report", *folders, str(tmp_path / "other"), "--measure", "false"]) == 2
    assert "other is not done yet: it has no result.json" in capsys.readouterr().err
    (Path(folders[0]) / "result.json").write_text("{")
    assert main(["report", *folders]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sens: {folders[0]}/result.json is damaged")
    assert error.count("\n") == 1

"""The commands of `sens`, from the command line to the files they write."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.export import _spread_samples
from structured_ensembles.cli.main import main
from structured_ensembles.cli.predict import read_picture
from structured_ensembles.data.digits import read_digits

QUICK = ["--model", "mlp", "--epochs", "2", "--members", "2", "--quiet", "true"]


def my_network(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def my_data() -> se.Data:
    return se.load_data("digits")


def my_method(model: nn.Module, data: se.Data, **settings: object) -> se.Ensemble:
    """Train a plain ensemble, as a method outside of the package."""
    return se.methods.single_network(model, data, recipe=settings["recipe"], seed=settings["seed"], quiet=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    assert main(["train", "--out", str(folder), *QUICK]) == 0
    return folder


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
    assert yaml.safe_load((run / "config.yaml").read_text())["model"] == "mlp"
    before = (run / "ensemble.safetensors").stat().st_mtime_ns
    assert main(["train", "--out", str(run), *QUICK]) == 0
    assert "done already" in capsys.readouterr().out
    assert (run / "ensemble.safetensors").stat().st_mtime_ns == before


def test_train_refuses_a_folder_of_another_configuration_or_of_other_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(run), *QUICK, "--seed", "3"]) == 2
    assert "holds a run with another seed" in capsys.readouterr().err
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


def test_evaluate_records_the_figures_of_a_split_and_rule(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--split", "validation", "--combine", "vote"]) == 0
    printed = capsys.readouterr().out
    assert "cls/accuracy" in printed
    assert "left out, since what they depend on was fitted to the validation split: conf/coverage, " in printed
    record = json.loads((run / "evaluation-validation-vote.json").read_text())
    assert 0 < record["figures"]["cls/accuracy"] <= 1
    assert not [name for name in record["figures"] if name.startswith(("unc/", "conf/")) or name.endswith("_t")]
    assert main(["evaluate", str(run.parent)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_evaluations_of_one_run_merge_into_one_record(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "evaluation-test-mean.json"

    def found() -> dict[str, float]:
        return json.loads(path.read_text())["figures"]

    assert main(["evaluate", str(run), "--corruptions", "fog", "snow", "--severities", "2"]) == 0
    assert {"cor/fog@2", "cor/snow@2", "cor/mean@2"} <= found().keys()
    assert "cor/mean@3" not in found()
    capsys.readouterr()
    assert main(["evaluate", str(run), "--fgsm", "0.02", "0.5", "--ood", "tests.cli.test_main:my_data"]) == 0
    shown = capsys.readouterr()
    assert {"cor/fog@2", "adv/fgsm@0.02", "adv/fgsm@0.5", "ood/entropy_fpr95"} <= found().keys()
    assert found()["ood/entropy_auroc"] == 0.5  # its own data
    assert json.loads(path.read_text())["ood"] == "tests.cli.test_main:my_data"
    row = next(line for line in shown.out.splitlines() if line.startswith("adv/fgsm@0.5 "))
    assert row.split()[1] == f"{100 * found()['adv/fgsm@0.5']:.2f}"
    assert found()["size/file_bytes"] == (run / "ensemble.safetensors").stat().st_size
    ensemble = se.Ensemble.load(run / "ensemble.safetensors")
    assert found()["size/overhead"] == pytest.approx(ensemble.overhead(se.zoo.mlp(64)))
    assert main(["evaluate", str(run), "--corruptions"]) == 0
    assert len([name for name in found() if name.startswith("cor/") and name.endswith("@5")]) == 18 + 2
    assert "photographs" in capsys.readouterr().out  # frost's photographs may not be shipped
    mean = found()["cor/mean@5"]
    accuracies = [found()[f"cor/{name}@5"] for name in se.evaluation.CORRUPTIONS if f"cor/{name}@5" in found()]
    assert mean == pytest.approx(sum(accuracies[:15]) / 15)  # the standard ones
    assert found()["cor/extra_mean@5"] == pytest.approx(sum(accuracies[15:]) / 3)  # without saturate: digits are grey
    assert main(["evaluate", str(run), "--corruptions", "spatter", "--severities", "5"]) == 0
    assert found()["cor/extra_mean@5"] == pytest.approx(sum(accuracies[15:]) / 3)
    assert main(["evaluate", str(run), "--corruptions", "fog", "--severities", "5"]) == 0
    assert found()["cor/mean@5"] == mean  # over all listed corruptions, as before
    assert main(["evaluate", str(run), "--corruptions", "fog", "snow", "--severities", "4"]) == 0
    assert main(["evaluate", str(run), "--corruptions", "brightness", "--severities", "4"]) == 0
    assert "cor/snow@4" in found()
    assert not any(name.startswith("cor/mean@4") for name in found())  # no mean is over all three
    assert main(["evaluate", str(run), "--fgsm"]) == 0
    assert json.loads(path.read_text())["ood"] == "tests.cli.test_main:my_data"  # the figures are still those
    assert main(["evaluate", str(run), "--corruptions", "rain"]) == 2
    assert "not 'rain'" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--official", "mnist-c"]) == 2
    assert "'cifar10-c'" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--official", "cifar10-c"]) == 2  # nothing is downloaded
    assert "images of shape (3, 32, 32), but the data of (1, 8, 8)" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--severities", "2"]) == 2
    assert "--severities are those of --corruptions or --official" in capsys.readouterr().err
    path.write_text("{")
    assert main(["evaluate", str(run)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_read_picture_handles_usual_image_formats(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    plain = Image.fromarray(pixels)
    plain.save(tmp_path / "plain.png")
    deep = np.minimum(pixels.astype(np.int32) * 257 + 100, 65535)
    Image.fromarray(deep.astype(np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(deep).save(tmp_path / "deep.tif")
    turned = Image.Exif()
    turned[0x0112] = 6
    plain.rotate(90).save(tmp_path / "turned.png", exif=turned)
    ink = Image.new("L", (8, 8), 0)
    Image.merge("RGBA", (ink, ink, ink, Image.fromarray(255 - pixels))).save(tmp_path / "ink.png")
    for name in ("plain.png", "deep.png", "deep.tif", "turned.png", "ink.png"):
        tensor, note = read_picture(tmp_path / name, (1, 8, 8))
        assert np.array_equal(tensor[0].numpy(), pixels), name
        assert note == ("transparent parts are white" if name == "ink.png" else "")
    Image.fromarray(pixels.astype(np.float32)).save(tmp_path / "floats.tif")
    Image.fromarray(pixels.astype(np.int32) * 70000).save(tmp_path / "large.tif")
    for name, reason in (("floats.tif", "floats"), ("large.tif", "8 or 16 bits")):
        with pytest.raises(OSError, match=reason):
            read_picture(tmp_path / name, (1, 8, 8))


def test_read_picture_cuts_out_the_middle_as_folders_of_pictures_do(tmp_path: Path) -> None:
    thirds = np.repeat(np.array([[0, 90, 255]], np.uint8), 16, axis=1).repeat(16, axis=0)  # 48×16
    Image.fromarray(thirds).save(tmp_path / "wide.png")
    tensor, note = read_picture(tmp_path / "wide.png", (1, 8, 8))
    assert bool((tensor[:, :, 3:5] == 90).all())
    assert note == "cut out of the middle and resized from 48×16 to 8×8"


def no_test() -> se.Data:
    return se.Data.from_arrays(np.zeros((40, 1, 8, 8), np.uint8), np.arange(40) % 10)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.yaml", "a: [1", "config.yaml is damaged"),
        ("config.yaml", "hello", "config.yaml is damaged: it says nothing of dataset, model, method, seed"),
        ("config.yaml", "", "config.yaml is damaged"),
        ("config.yaml", "dataset: digits\nmodel: mlp\nmethod: deep", "says nothing of seed"),
        ("result.json", "{}", "result.json is damaged: it has no figures"),
        ("result.json", "[]", "result.json is damaged"),
    ],
)
def test_damaged_run_folder_is_an_error_naming_the_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, reason: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / name).write_text(content)
    assert main(["report", str(copy), "--out", str(tmp_path / "report")]) == 2
    assert reason in capsys.readouterr().err
    assert main(["train", *QUICK, "--out", str(copy)]) == 2
    assert reason in capsys.readouterr().err


def test_reproduce_smoke_refuses_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "table-accuracy", "--smoke", "--dataset", "cifar10"]) == 2
    assert "leave out --dataset" in capsys.readouterr().err


def sums() -> se.Data:
    x = np.random.default_rng(0).random((60, 5), dtype=np.float32)
    return se.Data.from_arrays(x, x.sum(1), test=(x[:20], x[:20].sum(1)))


def test_train_and_report_work_for_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "--dataset", "tests.cli.test_main:sums", *QUICK, "--out", out]) == 0
    assert main(["report", out, "--out", str(tmp_path / "report"), "--trust_code", "true"]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    rmse = json.loads((tmp_path / "run" / "result.json").read_text())["figures"]["reg/rmse"]
    assert f"{rmse:.4f}" in text
    assert main(["train", "--dataset", "os:getcwd", *QUICK, "--out", str(tmp_path / "other")]) == 2
    assert "os:getcwd must give a Data, not a str" in capsys.readouterr().err


def test_invalid_arguments_create_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, start = tmp_path / "run", ["train", "--model", "mlp", "--epochs", "1", "--members", "2", "--quiet"]
    wrongs = (
        ["--prune", "1.5"],
        ["--memory", "1e-4"],
        ["--device", "cuda"],
        ["--dataset", "tests.cli.test_main:no_test"],
    )
    for wrong in wrongs:
        assert main([*start, *wrong, "--out", str(out)]) == 2
        assert not out.exists()
    shown = capsys.readouterr().err
    assert "memory=0.0001 is too little for 2 members" in shown
    assert "has no test split" in shown
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_predict_prints_class_probability_and_uncertainty_of_an_image(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = se.load_data("digits")
    pixels = data.test.inputs[0, 0].numpy()
    Image.fromarray(pixels).save(tmp_path / "right.png")
    Image.fromarray(np.kron(pixels, np.ones((4, 4), np.uint8))).convert("RGB").save(tmp_path / "large.jpg")
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    pictures = [str(tmp_path / name) for name in ("right.png", "large.jpg")]
    assert main(["predict", str(run), *pictures]) == 0
    shown = capsys.readouterr().out
    ensemble = se.Ensemble.load(run / "ensemble.safetensors")
    probabilities = ensemble.predict_proba(data.test.inputs[:1])[0]
    row = next(line for line in shown.splitlines() if "right.png" in line).split()
    assert row[1] == str(int(probabilities.argmax()))
    assert float(row[2]) == pytest.approx(100 * float(probabilities.max()), abs=0.06)
    unsure = ensemble.uncertainty(data.test.inputs[:1])
    assert ("keep" if ensemble.keep(data.test.inputs[:1]) else "discard") in row
    header = next(line for line in shown.splitlines() if "probability" in line)
    line = next(line for line in shown.splitlines() if "right.png" in line)
    cells = dict(zip(re.split(r"  +", header.strip()), re.split(r"  +", line.strip()), strict=False))
    assert float(cells["entropy"]) == pytest.approx(float(unsure.entropy), abs=6e-4)
    assert float(cells["mutual information"]) == pytest.approx(float(unsure.mutual_information), abs=6e-4)
    assert float(cells["disagreement"].removesuffix("%")) == pytest.approx(100 * float(unsure.disagreement), abs=0.6)
    classes = ensemble.predict_set(data.test.inputs[:1])[0].nonzero().flatten().tolist()
    assert cells["set"] == "{" + ", ".join(map(str, classes)) + "}" or len(classes) > 5
    assert header.split()[-2:] == ["verdict", "note"]
    assert "which keeps 95 % of what it gets right" in shown
    assert "resized from 32×32 to 8×8" in next(line for line in shown.splitlines() if "large.jpg" in line)
    assert main(["predict", str(run / "ensemble.safetensors"), str(tmp_path / "broken.png"), pictures[0]]) == 1
    captured = capsys.readouterr()
    assert "broken.png cannot be read" in captured.err
    assert "right.png" in captured.out
    assert main(["predict", str(tmp_path / "nowhere"), pictures[0]]) == 2
    assert "there is no file" in capsys.readouterr().err


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
        "tests.cli.test_main:my_network",
        "--model_arguments",
        '{"width": 20}',
        "--dataset",
        "tests.cli.test_main:my_data",
    ]
    assert main(["train", "--out", str(folder), *arguments, "--epochs", "1", "--members", "2", "--quiet", "true"]) == 0
    assert main(["evaluate", str(folder)]) == 2  # the file names code to import
    assert main(["evaluate", str(folder), "--trust_code", "true"]) == 0
    other = ["--method", "tests.cli.test_main:my_method", "--model", "mlp", "--epochs", "1"]
    assert main(["train", "--out", str(tmp_path / "method"), *other]) == 0


def my_numbers() -> se.Data:
    x = torch.rand(200, 6, generator=torch.Generator().manual_seed(0))
    return se.Data.from_arrays(x, x.sum(1), test=(x, x.sum(1)))


def my_regressor(**_: object) -> nn.Module:
    return se.zoo.mlp(6, 1)


def test_default_recipe_follows_the_task(tmp_path: Path) -> None:
    numbers = ["--dataset", "tests.cli.test_main:my_numbers", "--model", "tests.cli.test_main:my_regressor"]
    kinds = {"regression": numbers, "modern": ["--model", "mlp"], "paper": ["--model", "mlp", "--recipe", "paper"]}
    for name, arguments in kinds.items():
        folder = tmp_path / name
        assert main(["train", "--out", str(folder), *arguments, "--epochs", "2", "--members", "2"]) == 0
        assert yaml.safe_load((folder / "config.yaml").read_text())["recipe"] == name


def test_config_file_accepts_any_option(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    options = {"model": "mlp", "epochs": 1, "members": 2, "prune": 0.7, "quiet": True, "changes": {"rate": 0.05}}
    config.write_text(yaml.safe_dump(options))
    assert main(["train", "--config", str(config), "--out", str(tmp_path / "run")]) == 0
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["method_arguments"] == {"prune": 0.7}
    assert saved["changes"] == {"rate": 0.05, "epochs": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "imagenet"], "dataset must be one of"),
        (["--model", "resnet1000"], "model must be one of"),
        (["--model", "lenet5-backbone"], "'lenet5-backbone' is for `sens continual`, use 'lenet5' here"),
        (["--model", "no.such:thing"], "cannot be imported"),
        (["--prune", "1.5"], "prune must be"),
        (["--members", "0"], "members must be"),
        (["--changes", '{"rate": -1}'], "rate must be"),
        (["--changes", '{"ratee": 1}'], "a recipe has no 'ratee'"),
        (["--method", "magic"], "method must be one of single, deep, structured"),
        (["--model_arguments", '{"depth": 3}'], "takes the arguments"),
    ],
)
def test_invalid_options_are_one_error_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--model", "mlp", "--epochs", "1"] if "--model" not in arguments else ["--epochs", "1"]
    assert main(["train", "--out", str(tmp_path / "run"), *quick, *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_binary_config_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["train", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "--config must be a YAML file" in capsys.readouterr().err


def test_models_and_datasets_list_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "128,796,352" in shown
    assert "package.module:function" in shown
    assert main(["datasets"]) == 0
    assert "tiny-imagenet" in capsys.readouterr().out


def test_demo_refuses_invalid_options_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "-1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "epochs must be a whole number" in captured.err


def test_demo_writes_a_report_with_the_figures_of_its_ensembles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path), "--epochs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "structured ensemble of 5" in shown
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('class="sample"') == 24  # twelve discarded and twelve kept
    for name in ("front-parameters", "reliability", "coverage", "discarding", "entropy", "kept"):
        assert page.count(f'data-name="{name}"') == 1, name
    assert "Five networks cut out of one" in page
    assert not re.search(r"https?://|//[a-z]", page.replace("// ", ""))  # nothing is loaded from elsewhere
    data = read_digits(test_share=1 / 2, validation_share=1 / 3)
    loaded = {name: se.Ensemble.load(tmp_path / f"{name}.safetensors") for name in ("single", "deep", "structured")}
    figures = {name: se.evaluate(ensemble, data) for name, ensemble in loaded.items()}
    rows = re.findall(r'<tr[^>]*><th scope="row"[^>]*>([^<]*)</th>(.*?)</tr>', page)
    shown = {name: re.findall(r'data-value="([^"]*)"', cells) for name, cells in rows}
    titles = {"single": "one network", "deep": "deep ensemble of 5", "structured": "structured ensemble of 5"}
    for method, ensemble_figures in figures.items():  # before and after temperature, and the sets, of every method
        names = ("cls/accuracy", "cal/ece", "cal/ece_t", "cal/nll", "cal/nll_t", "conf/coverage", "conf/size")
        expected = [ensemble_figures[name] for name in names]
        assert [float(value) for value in shown[titles[method]][:7]] == pytest.approx(expected)
    assert figures["structured"]["cal/ece_t"] <= figures["single"]["cal/ece"]
    single, structured = (se.Ensemble.load(tmp_path / f"{name}.safetensors") for name in ("single", "structured-int8"))
    assert (tmp_path / "structured-int8.safetensors").stat().st_size < (tmp_path / "single.safetensors").stat().st_size
    assert (len(single), len(structured)) == (1, 5)
    assert torch.isfinite(structured(torch.rand(2, 1, 8, 8))).all()


def test_export_writes_files_that_predict_like_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    from structured_ensembles.export import run_onnx

    files = [str(tmp_path / name) for name in ("e.onnx", "e8.onnx", "e.pt2")]
    assert main(["export", str(run), "--onnx", files[0], "--int8", files[1], "--pt2", files[2]]) == 0
    printed = capsys.readouterr().out
    assert all(file in printed for file in files)
    assert "accuracy" in printed
    data = se.load_data("digits")
    inputs = data.test.inputs[data.test.index[:8]]
    expected = se.Ensemble.load(run / "ensemble.safetensors").predict_proba(inputs)
    floats = inputs.float() / 255 if not inputs.is_floating_point() else inputs
    torch.testing.assert_close(run_onnx(files[0], floats)["probabilities"], expected, atol=1e-4, rtol=1e-4)
    assert main(["export", str(run)]) == 2
    assert "give --onnx FILE, --pt2 FILE, --folder FOLDER, or several of them" in capsys.readouterr().err


def test_int8_is_calibrated_and_tested_on_samples_of_all_classes() -> None:
    labels = torch.arange(4).repeat_interleave(50)
    pixels = labels[:, None, None, None].expand(200, 1, 8, 8).to(torch.uint8)
    inputs, targets = _spread_samples(se.Data.from_arrays(pixels, labels, validation=0).train, 20)
    assert targets.bincount().tolist() == [5, 5, 5, 5]
    assert torch.equal(inputs[:, 0, 0, 0] * 255, targets.float())


def test_export_writes_a_folder_with_the_figures_of_the_run(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--folder", str(tmp_path / "shared")]) == 0
    figures = json.loads((run / "result.json").read_text())["figures"]
    card = (tmp_path / "shared" / "README.md").read_text()
    assert f"| `cls/accuracy` | {figures['cls/accuracy']:.6g} |" in card
    assert "measured them on the test split of digits" in card
    assert len(se.Ensemble.from_pretrained(tmp_path / "shared")) == 2


def test_predict_takes_folders_and_writes_csv_and_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = se.load_data("digits").test.inputs[:70]  # more than one batch
    (tmp_path / "pictures" / "deep").mkdir(parents=True)
    for index, pixels in enumerate(digits):
        folder = tmp_path / "pictures" / ("deep" if index % 2 else "")
        Image.fromarray(pixels[0].numpy()).save(folder / f"{index:03}.png")
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    assert main(["predict", str(run), str(tmp_path / "pictures"), "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    names = [str(path) for path in sorted((tmp_path / "pictures").rglob("*.png"))]
    assert [entry["picture"] for entry in listed] == names
    ensemble = se.Ensemble.load(run / "ensemble.safetensors")
    order = [int(Path(name).stem) for name in names]
    probabilities, uncertainty = ensemble.predict_proba(digits[order]), ensemble.uncertainty(digits[order])
    assert [entry["class"] for entry in listed] == [str(int(label)) for label in probabilities.argmax(-1)]
    assert [entry["probability"] for entry in listed] == pytest.approx(probabilities.amax(-1).tolist(), rel=1e-5)
    assert [entry["entropy"] for entry in listed] == pytest.approx(uncertainty.entropy.tolist(), abs=1e-5)
    kept = ensemble.keep(digits[order])
    assert [entry["verdict"] for entry in listed] == ["keep" if keep else "discard" for keep in kept]
    sets = ensemble.predict_set(digits[order])
    assert [entry["set"] for entry in listed] == [[str(n) for n in row.nonzero().flatten().tolist()] for row in sets]
    assert main(["predict", str(run), *names, "--format=csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["picture"] for row in rows] == names
    assert [float(row["mutual_information"]) for row in rows] == [entry["mutual_information"] for entry in listed]
    assert [row["set"].split("|") for row in rows] == [entry["set"] or [""] for entry in listed]
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(run), str(tmp_path / "empty"), "--format", "json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == []
    assert "empty cannot be read: the folder has no pictures (.png" in captured.err
    assert main(["predict", str(tmp_path / "empty"), names[0]]) == 2
    assert "must be a run folder of sens train, or an ensemble's file" in capsys.readouterr().err


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

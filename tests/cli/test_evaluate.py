"""`sens evaluate`: figures of a split and a rule, merged into one record."""

import json
from pathlib import Path

import pytest

import structured_ensembles as se
from structured_ensembles.cli.main import main


def my_data() -> se.Data:
    return se.load_data("digits")


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
    assert main(["evaluate", str(run), "--fgsm", "0.02", "0.5", "--ood", "tests.cli.test_evaluate:my_data"]) == 0
    shown = capsys.readouterr()
    assert {"cor/fog@2", "adv/fgsm@0.02", "adv/fgsm@0.5", "ood/entropy_fpr95"} <= found().keys()
    assert found()["ood/entropy_auroc"] == 0.5  # its own data
    assert json.loads(path.read_text())["ood"] == "tests.cli.test_evaluate:my_data"
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
    assert json.loads(path.read_text())["ood"] == "tests.cli.test_evaluate:my_data"  # the figures are still those
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

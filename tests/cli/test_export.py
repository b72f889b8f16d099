"""`sens export`: files that predict like the run, and a folder to share."""

import json
from pathlib import Path

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.cli.export import _spread_samples
from structured_ensembles.cli.main import main


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


def test_export_writes_a_folder_with_the_figures_of_the_run_and_reads_no_data(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("structured_ensembles.cli.export.load_run_data", lambda *_: pytest.fail("data are read"))
    assert main(["export", str(run), "--folder", str(tmp_path / "shared")]) == 0
    figures = json.loads((run / "result.json").read_text())["figures"]
    card = (tmp_path / "shared" / "README.md").read_text()
    assert f"| `cls/accuracy` | {figures['cls/accuracy']:.6g} |" in card
    assert "measured them on the test split of digits" in card
    assert len(se.Ensemble.from_pretrained(tmp_path / "shared")) == 2

"""`sens predict`: pictures as they are read, and what is said of them."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.cli.predict import read_picture


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
    (tmp_path / "empty" / "config.yaml").touch()  # of a run that was stopped
    assert main(["predict", str(tmp_path / "empty"), names[0]]) == 2
    assert "is not done yet, or its file is lost" in capsys.readouterr().err


def test_predict_names_an_output_without_a_class_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network = se.zoo.mlp(64, 4, hidden=(8,))
    torch.nn.init.zeros_(network.layers[-1].weight)
    with torch.no_grad():
        network.layers[-1].bias.copy_(torch.tensor([1.0, 0.0, 0.0, 2.0]))
    ensemble = se.Ensemble([network])
    data = se.Data.from_arrays(pixels, torch.arange(60) % 2, classes=["cat", "dog"])
    ensemble.adopt(data)
    ensemble.conformal(data, 0.8)
    ensemble.save(tmp_path / "four.safetensors")
    Image.fromarray(pixels[0, 0].numpy()).save(tmp_path / "picture.png")
    files = [str(tmp_path / name) for name in ("four.safetensors", "picture.png")]
    assert main(["predict", *files, "--format", "json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["class"] == "3"
    assert {"cat", "dog", "3"} <= set(entry["set"])

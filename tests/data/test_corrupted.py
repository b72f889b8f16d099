"""The official corrupted images, read from miniature archives in their formats."""

import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.data import corrupted
from structured_ensembles.data.corrupted import CORRUPTED_SETS, has_corrupted, load_corrupted
from structured_ensembles.evaluation.corruptions import STANDARD
from structured_ensembles.paper.studies import EVERYTHING
from structured_ensembles.runs.evaluations import read_figures
from structured_ensembles.runs.measurement import measure_experiment
from tests.support.archives import picture, tiny_imagenet

SAMPLES = 4
NAMES = ("brightness", "fog")


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def cifar_files(classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    files = {f"{name}.npy": rng.integers(0, 256, (5 * SAMPLES, 32, 32, 3), dtype=np.uint8) for name in NAMES}
    return files | {"labels.npy": np.tile(classes - 1 - np.arange(SAMPLES), 5).astype(np.uint8)}


def jpeg_files(classes: list[str]) -> dict[str, bytes]:
    """Make a file corruption/severity/class/name.JPEG of a different grey for each."""
    files = {}
    for number, name in enumerate(NAMES):
        for severity in range(1, 6):
            for label, identifier in enumerate(classes):
                stream = io.BytesIO()
                grey = 10 * severity + 30 * label + 60 * number
                Image.fromarray(np.full((64, 64, 3), grey, np.uint8)).save(stream, "JPEG", quality=95)
                files[f"{name}/{severity}/{identifier}/test_{9 - label}.JPEG"] = stream.getvalue()
    return files


def unpack(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def pack(path: Path, folder: str, files: Mapping[str, bytes], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in {
            "../escape.npy": b"no",
            **{f"{folder}/{name}": content for name, content in files.items()},
        }.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def expect(monkeypatch: pytest.MonkeyPatch, name: str, root: Path, **fields: int) -> None:
    """Describe the set as the files under `root` have it; no real server is asked."""
    info = CORRUPTED_SETS[name]

    def here(archive: corrupted.Archive) -> corrupted.Archive:
        path = root / "downloads" / archive.file
        md5 = hashlib.md5(path.read_bytes()).hexdigest() if path.exists() else archive.md5
        return replace(archive, md5=md5, sha256="", url=f"http://127.0.0.1:9/{archive.file}")

    clean = None if info.clean is None else here(info.clean)
    changed = replace(info, samples=SAMPLES, archive=here(info.archive), clean=clean, **fields)
    monkeypatch.setitem(CORRUPTED_SETS, name, changed)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "folder", "classes"), [("cifar10-c", "CIFAR-10-C", 10), ("cifar100-c", "CIFAR-100-C", 100)]
)
def test_cifar_c_arrays_are_read_from_folder_and_archive(
    name: str, folder: str, classes: int, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = cifar_files(classes)
    files = {key: npy(array) for key, array in arrays.items()}
    if packed:
        pack(tmp_path / "downloads" / f"{folder}.tar", folder, files)
    else:
        unpack(tmp_path / folder, files)
    expect(monkeypatch, name, tmp_path)
    data = load_corrupted(name, tmp_path)
    assert data.names == NAMES
    for corruption in NAMES:
        for severity in range(1, 6):
            split = data.split(corruption, severity)
            rows = slice((severity - 1) * SAMPLES, severity * SAMPLES)
            np.testing.assert_array_equal(split.inputs.numpy(), arrays[f"{corruption}.npy"][rows].transpose(0, 3, 1, 2))
            assert split.targets.tolist() == arrays["labels.npy"][rows].tolist()
            assert split.inputs.dtype == torch.uint8
    with pytest.raises(ValueError, match="name must be one of brightness, fog, not 'rain'"):
        data.split("rain", 1)
    with pytest.raises(ValueError, match="severity must be one of 1, 2, 3, 4, 5, not 0"):
        data.split("fog", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["downloads"] if packed else [folder])


@pytest.mark.parametrize("packed", [True, False])
def test_tiny_imagenet_c_is_read_from_folder_and_archive(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "downloads").mkdir()
    classes = ["n03", "n01", "n02", "n04"]  # in the order of wnids.txt, which is not that of the alphabet
    tiny_imagenet(tmp_path / "downloads" / "tiny-imagenet-200.zip", classes, picture, None)
    files = jpeg_files(classes)
    if packed:
        pack(tmp_path / "downloads" / "Tiny-ImageNet-C.tar", "Tiny-ImageNet-C", files)
    else:
        unpack(tmp_path / "Tiny-ImageNet-C", files)
    expect(monkeypatch, "tiny-imagenet-c", tmp_path, num_classes=4)
    data = load_corrupted("tiny-imagenet-c", tmp_path)
    assert data.names == NAMES
    split = data.split("fog", 3)
    assert split.targets.tolist() == [1, 2, 0, 3]  # in the order of the files' names
    assert split.inputs.shape == (4, 3, 64, 64)
    for image, label in zip(split.inputs, split.targets.tolist(), strict=True):
        assert float(image.float().mean()) == pytest.approx(30 + 30 * label + 60, abs=2)


def broken(arrays: dict[str, np.ndarray]) -> dict[str, tuple[dict[str, bytes], str]]:
    files = {key: npy(array) for key, array in arrays.items()}
    objects = io.BytesIO()
    np.save(objects, np.array([{"evil": 1}], dtype=object), allow_pickle=True)
    return {
        "no labels": ({key: content for key, content in files.items() if key != "labels.npy"}, "no file labels.npy"),
        "a pickle": (files | {"fog.npy": objects.getvalue()}, "not of numbers"),
        "truncated": (files | {"fog.npy": files["fog.npy"][:-1]}, "incomplete"),
        "empty": (files | {"fog.npy": b""}, "fog at severity 2 cannot be read"),
        "no array": (files | {"fog.npy": b"<html>not found</html>"}, "magic"),
        "too few": (files | {"fog.npy": npy(arrays["fog.npy"][1:])}, "shape"),
        "floats": (files | {"fog.npy": npy(arrays["fog.npy"] / 255)}, "float64"),
        "foreign labels": (files | {"labels.npy": npy(arrays["labels.npy"] + 1)}, "reach from 7 to 10"),
    }


@pytest.mark.parametrize("damage", broken(cifar_files(10)))
def test_damaged_corrupted_files_are_errors(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, message = broken(cifar_files(10))[damage]
    unpack(tmp_path / "CIFAR-10-C", files)
    expect(monkeypatch, "cifar10-c", tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_corrupted("cifar10-c", tmp_path).split("fog", 2)
    assert "cifar10-c: fog at severity 2" in str(caught.value)


def test_archives_are_verified_by_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="name must be one of 'cifar10-c', 'cifar100-c', 'tiny-imagenet-c', not 'svhn'"
    ):
        load_corrupted("svhn", tmp_path)
    expect(monkeypatch, "cifar10-c", tmp_path)
    with pytest.raises(RuntimeError, match=r"cannot be downloaded .* put http://127.0.0.1:9/CIFAR-10-C.tar at"):
        load_corrupted("cifar10-c", tmp_path)
    path = tmp_path / "downloads" / "CIFAR-10-C.tar"
    pack(path, "CIFAR-10-C", {key: npy(array) for key, array in cifar_files(10).items()})
    with pytest.raises(ValueError, match="md5 checksum"):
        load_corrupted("cifar10-c", tmp_path)
    path.write_bytes(b"not a tar archive" * 100)
    expect(monkeypatch, "cifar10-c", tmp_path)
    with pytest.raises(ValueError, match="cannot be read as cifar10-c"):
        load_corrupted("cifar10-c", tmp_path)
    pack(path, "CIFAR-100-C", {"fog.npy": b""})
    expect(monkeypatch, "cifar10-c", tmp_path)
    with pytest.raises(ValueError, match="holds no images of cifar10-c"):
        load_corrupted("cifar10-c", tmp_path)
    assert all(len(bytes.fromhex(info.archive.md5)) == 16 for info in CORRUPTED_SETS.values())


def test_http_archives_have_more_than_an_md5() -> None:
    for archive in (info.archive for info in CORRUPTED_SETS.values()):
        assert archive.url.startswith("https:") or archive.sha256, archive.url


def test_evaluate_uses_official_corrupted_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack(tmp_path / "CIFAR-10-C", {key: npy(array) for key, array in cifar_files(10).items()})
    expect(monkeypatch, "cifar10-c", tmp_path)
    official = load_corrupted("cifar10-c", tmp_path)
    images = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8)
    data = se.Data.from_arrays(images, torch.arange(20) % 10, test=(images, torch.arange(20) % 10))
    torch.manual_seed(0)
    ensemble = se.Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))], threshold=2.0)
    ensemble.adopt(data)
    figures = se.evaluate(ensemble, data, corruptions=official, severities=[2])
    accuracies = []
    for name in NAMES:
        split = official.split(name, 2)
        accuracies.append(float((ensemble.predict(split.inputs) == split.targets).double().mean()))
        assert figures[f"official/{name}@2"] == accuracies[-1]
    assert figures["official/mean@2"] == pytest.approx(np.mean(accuracies))
    assert 0 <= figures["official/mean@2/discarded"] <= 1
    digits = se.load_data("digits")
    with pytest.raises(
        ValueError, match=r"corruptions have images of shape \(3, 32, 32\), but the data of \(1, 8, 8\)"
    ):
        se.evaluate(ensemble, digits, corruptions=official)
    pairs = se.Data.from_arrays(images, torch.arange(20) % 2, test=(images, torch.arange(20) % 2))
    with pytest.raises(ValueError, match="corruptions have images of 10 classes, but the data of 2"):
        se.evaluate(ensemble, pairs, corruptions=official)


def official_digits(root: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = STANDARD) -> None:
    """Put official images of digits into a data folder, as CIFAR-10-C has them: noise, with the labels 0 to 9."""
    rng = np.random.default_rng(0)
    arrays = {f"{name}.npy": rng.integers(0, 256, (100, 8, 8, 1), dtype=np.uint8) for name in (*names, "spatter")}
    arrays["labels.npy"] = np.arange(100) % 10
    unpack(root / "DIGITS-C", {name: npy(array) for name, array in arrays.items()})
    archive = replace(CORRUPTED_SETS["cifar10-c"].archive, url="http://127.0.0.1:9/DIGITS-C.tar")
    info = replace(CORRUPTED_SETS["cifar10-c"], name="digits-c", shape=(1, 8, 8), samples=20, archive=archive)
    monkeypatch.setitem(CORRUPTED_SETS, "digits-c", info)


def test_reproduce_prefers_official_corrupted_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structured_ensembles.report.page.draw_pictures", lambda runs: [])  # which take long to draw
    root, out = tmp_path / "data", tmp_path / "out"
    command = ["reproduce", "table-uncertainty", "--smoke", "--method", "single", "--seeds", "0", "--quiet"]
    command += ["--root", str(root), "--out", str(out), "--backend", "sequential"]
    page = out / "smoke" / "table-uncertainty" / "report.md"

    def row() -> str:
        return next(line for line in page.read_text().splitlines() if line.startswith("| single"))

    assert main(command) == 0
    (run,) = (out / "smoke" / "runs").iterdir()
    ours = read_figures(run / "evaluation-test-mean.json")
    assert f"{100 * ours['cor/mean@3']:.2f}" in row()
    assert "The ice of frost is ours too" in page.read_text()
    assert "official" not in page.read_text()

    official_digits(root, monkeypatch, STANDARD[1:])  # not all of them: ours again
    assert not has_corrupted("digits-c", root, STANDARD)
    official_digits(root, monkeypatch)
    assert has_corrupted("digits-c", root, STANDARD)
    assert main(command) == 0
    figures = read_figures(run / "evaluation-test-mean.json")
    accuracies = [figures[f"official/{name}@3"] for name in STANDARD]
    assert figures["official/mean@3"] == pytest.approx(np.mean(accuracies))
    assert figures["official/extra_mean@3"] == figures["official/spatter@3"]
    assert figures["cor/mean@3"] == ours["cor/mean@3"] != figures["official/mean@3"]
    assert f"{100 * figures['official/mean@3']:.2f}" in row()
    assert "For digits they are of the official corrupted images." in page.read_text()
    assert "The ice of frost is ours too" not in page.read_text()
    assert not measure_experiment(run, EVERYTHING, root=root)[1]  # nothing is measured again
    assert not has_corrupted("mnist-c", root, STANDARD)
    assert not has_corrupted("cifar10-c", root, STANDARD)

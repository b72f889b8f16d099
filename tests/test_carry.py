"""tools/carry.py: data and runs that travel to a machine with a GPU, and back."""

import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
carry = runpy.run_path(str(ROOT / "tools" / "carry.py"))


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder with a small colour data set and a grey one, in the format of the cache."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("cifar10", (3, 32, 32)), ("mnist", (1, 28, 28))):
        tensors = {
            f"{split}.images": torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
            for split, count in (("train", 700), ("test", 30))
        }
        tensors |= {f"{split}.labels": torch.arange(count) % 10 for split, count in (("train", 700), ("test", 30))}
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata={"name": name, "classes": "[]", "source": "here"})
    return tmp_path


def test_data_comes_out_as_it_went_in(data_folder: Path, tmp_path: Path) -> None:
    for name in ("cifar10", "mnist"):
        carry["pack_data"](name, data_folder, tmp_path, 10**6)
        parts = sorted(tmp_path.glob(f"{name}.*.part"))
        assert len(parts) == {"cifar10": 3, "mnist": 1}[name]
        carry["unpack_data"](name, tmp_path, tmp_path / "there")
        before, after = (
            load_file(data_folder / f"{name}.safetensors"),
            load_file(tmp_path / "there" / f"{name}.safetensors"),
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_missing_part_is_named(data_folder: Path, tmp_path: Path) -> None:
    carry["pack_data"]("cifar10", data_folder, tmp_path, 10**6)
    (tmp_path / "cifar10.1.part").unlink()
    with pytest.raises(SystemExit, match="has 2 of the 3 files of cifar10"):
        carry["unpack_data"]("cifar10", tmp_path, tmp_path / "there")


def test_code_travels_runs_come_back(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "tools/carry.py", "pack", "--out", tmp_path / "carry"], check=True, cwd=tmp_path
    )
    options = ["--smoke", "--seeds", "0", "--method", "naive", "--device", "cpu", "--backend", "sequential"]
    subprocess.run(
        [
            sys.executable,
            "carry/carry.py",
            "run",
            "carry",
            "--work",
            "work",
            "--workers",
            "1",
            "--minutes",
            "5",
            *options,
        ],
        check=True,
        cwd=tmp_path,
    )
    run = "split-digits/continual-digits-5t-lenet5-naive-epochs=3-0"
    with tarfile.open(tmp_path / "carry/back/results.tar.gz") as archive:
        names = [name for name in archive.getnames() if name.startswith("split-digits")]
    assert set(names) == {f"{run}/{name}" for name in ("config.yaml", "result.json", "matrix.json")}


def test_unfinished_runs_travel_with_all_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, unfinished = (tmp_path / "results" / "section" / name for name in ("finished", "unfinished"))
    for folder in (finished, unfinished):
        folder.mkdir(parents=True)
        for name in ("config.yaml", "identity.json", "checkpoint.safetensors", "run.lock"):
            (folder / name).write_text(name)
    (finished / "result.json").write_text("{}")
    kept = {unfinished / name for name in ("config.yaml", "identity.json", "checkpoint.safetensors")}
    assert set(carry["unfinished_files"](tmp_path / "results")) == kept
    carry["pack_back"](tmp_path / "results", tmp_path / "back")
    with tarfile.open(tmp_path / "back" / "results.tar.gz") as archive:
        assert set(archive.getnames()) == {"section/finished/config.yaml", "section/finished/result.json"}
    with tarfile.open(tmp_path / "back" / "unfinished-0.tar.gz") as archive:
        assert set(archive.getnames()) == {path.relative_to(tmp_path / "results").as_posix() for path in kept}
    monkeypatch.setitem(carry["pack_back"].__globals__, "CHECKPOINT", 10)
    carry["pack_back"](tmp_path / "results", tmp_path / "back")
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["results.tar.gz"]  # too large to travel

"""tools/carry.py: data and runs go to a machine with a GPU and come back."""

import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from structured_ensembles.paper.sections import plan_runs
from structured_ensembles.training.history import COLUMNS
from tests.support.paths import ROOT

# Whatever a run goes on from: of a method, of a search, of a continual learner
UNFINISHED = ("config.yaml", "identity.json", "subnets.json", "checkpoint-2.safetensors", "learner.safetensors")
carry = runpy.run_path(str(ROOT / "tools" / "carry.py"))


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """Make a folder with a small colour data set and a grey one, in the format of the cache."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("cifar10", (3, 32, 32)), ("mnist", (1, 28, 28))):
        tensors = {
            f"{split}.images": torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
            for split, count in (("train", 700), ("test", 30))
        }
        tensors |= {f"{split}.labels": torch.arange(count) % 10 for split, count in (("train", 700), ("test", 30))}
        save_file(tensors, tmp_path / f"{name}.safetensors", metadata={"name": name, "classes": "[]", "source": "here"})
    return tmp_path


def test_packed_data_round_trips(data_folder: Path, tmp_path: Path) -> None:
    for name in ("cifar10", "mnist"):
        carry["pack_data"](name, data_folder, tmp_path, 10**6)
        packed_files = sorted(tmp_path.glob(f"{name}.*.part"))
        assert len(packed_files) == {"cifar10": 3, "mnist": 1}[name]
        carry["unpack_data"](name, tmp_path, tmp_path / "there")
        before, after = (
            load_file(data_folder / f"{name}.safetensors"),
            load_file(tmp_path / "there" / f"{name}.safetensors"),
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_missing_part_of_a_pack_is_an_error(data_folder: Path, tmp_path: Path) -> None:
    carry["pack_data"]("cifar10", data_folder, tmp_path, 10**6)
    (tmp_path / "cifar10.1.part").unlink()
    with pytest.raises(SystemExit, match="has 2 of the 3 files of cifar10"):
        carry["unpack_data"]("cifar10", tmp_path, tmp_path / "there")


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_truncated_part_of_a_pack_is_an_error(data_folder: Path, tmp_path: Path, kept: int) -> None:
    carry["pack_data"]("mnist", data_folder, tmp_path, 10**6)
    part = tmp_path / "mnist.0.part"
    part.write_bytes(part.read_bytes()[:kept])
    with pytest.raises(SystemExit, match=r"mnist\.0\.part was not copied as a whole: copy it again"):
        carry["unpack_data"]("mnist", tmp_path, tmp_path / "there")


def files_in(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return {member.name for member in opened.getmembers() if member.isfile()}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a small repository that the tool takes for ours."""
    root = tmp_path / "checkout"
    unfinished = [f"results/s/run/{name}" for name in UNFINISHED]
    for name in ("src/a.py", "docs/b.md", "results/queue.yaml", *unfinished):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    shutil.copy(ROOT / "results" / ".gitignore", root / "results")
    subprocess.run(["git", "init", "-q"], check=True, cwd=root)
    monkeypatch.setitem(carry["pack_all"].__globals__, "ROOT", root)
    return root


def files_of_pieces(pieces: list[Path]) -> set[str]:
    with carry["open_pieces"](pieces) as archive:
        return {member.name for member in archive if member.isfile()}


def test_unfinished_runs_are_packed_beside_the_code(checkout: Path, tmp_path: Path) -> None:
    done = checkout / "results" / "s" / "done"
    done.mkdir()
    for name in ("config.yaml", "result.json", "ensemble.safetensors"):
        (done / name).write_text(name)
    carry["pack_all"](Namespace(out=tmp_path / "carry", packages=[], datasets=[], mib=56))
    packed = files_in(tmp_path / "carry" / "code.tar.gz")
    finished = {f"results/s/done/{name}" for name in ("config.yaml", "result.json")}
    assert packed == finished | {"src/a.py", "results/.gitignore", "results/queue.yaml", "results/s/run/config.yaml"}
    (pieces,) = carry["find_unfinished"](tmp_path / "carry")
    assert files_of_pieces(pieces) == {f"s/run/{name}" for name in UNFINISHED}  # also what git ignores


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """Make results of two unfinished runs, whose checkpoints are 150,000 random bytes."""
    results = tmp_path / "there"
    for number, name in enumerate(("first", "second")):
        run = results / "s" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(name)
        (run / "checkpoint.safetensors").write_bytes(random.Random(number).randbytes(150_000))
    return results


def test_large_checkpoints_come_back_in_pieces(checkout: Path, two_runs: Path, tmp_path: Path) -> None:
    carry["pack_back"](two_runs, tmp_path / "back", 0.05, 60)
    names = sorted(path.name for path in (tmp_path / "back").glob("unfinished-*"))
    assert names == [f"unfinished-{run}.{piece}-of-3" for run in (0, 1) for piece in (1, 2, 3)]
    assert all(path.stat().st_size <= 0.05 * 2**20 for path in (tmp_path / "back").glob("unfinished-*"))
    carry["unpack_back"](Namespace(back=tmp_path / "back"))
    for file in ("first/checkpoint.safetensors", "second/checkpoint.safetensors", "second/config.yaml"):
        assert (checkout / "results" / "s" / file).read_bytes() == (two_runs / "s" / file).read_bytes()


def test_pieces_of_an_earlier_call_are_removed(two_runs: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    carry["pack_back"](two_runs, back, 0.05, 60)
    (two_runs / "s" / "second" / "checkpoint.safetensors").write_bytes(b"")
    carry["pack_back"](two_runs, back, 0.1, 60)
    assert sorted(path.name for path in back.glob("unfinished-*")) == [
        "unfinished-0.1-of-2", "unfinished-0.2-of-2", "unfinished-1.1-of-1"
    ]  # fmt: skip


def test_missing_piece_is_an_error_before_anything_is_unpacked(checkout: Path, two_runs: Path, tmp_path: Path) -> None:
    carry["pack_back"](two_runs, tmp_path / "back", 0.05, 60)
    (tmp_path / "back" / "unfinished-1.2-of-3").unlink()
    with pytest.raises(SystemExit, match="has 2 of the 3 files of unfinished-1: copy the others, or delete it"):
        carry["unpack_back"](Namespace(back=tmp_path / "back"))
    assert not (checkout / "results" / "s" / "first").exists()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_truncated_piece_is_an_error(number: int, checkout: Path, two_runs: Path, tmp_path: Path) -> None:
    carry["pack_back"](two_runs, tmp_path / "back", 0.05, 60)
    piece = tmp_path / "back" / f"unfinished-0.{number}-of-3"
    piece.write_bytes(piece.read_bytes()[:-1000])
    with pytest.raises(SystemExit, match=r"unfinished-0\.1-of-3 or one that follows it was not copied as a whole"):
        carry["unpack_back"](Namespace(back=tmp_path / "back"))
    assert not (checkout / "results" / "s" / "first").exists()


def test_unfinished_runs_are_returned_as_far_as_there_is_room(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, back = tmp_path / "there", tmp_path / "back"
    runs = {
        "done": {"config.yaml": 1, "result.json": 1, "history.csv": 1, "ensemble.safetensors": 99, "run.log": 1},
        "begun": {"config.yaml": 1, "identity.json": 1, "checkpoint.safetensors": 2**20 - 2, "run.lock": 1},
        "large": {"config.yaml": 1, "identity.json": 1, "checkpoint.safetensors": 2**20 - 1},
    }
    for run, files in runs.items():
        (results / "s" / run).mkdir(parents=True)
        for name, size in files.items():
            (results / "s" / run / name).write_bytes(bytes(size))
    carry["pack_back"](results, back, 15, 1)
    assert f"1.0 MiB  left behind: {results / 's' / 'large'}" in capsys.readouterr().out
    done = {f"s/done/{name}" for name in ("config.yaml", "result.json", "history.csv")}
    assert files_in(back / "results.tar.gz") == done
    (other,) = carry["find_unfinished"](back)
    assert files_of_pieces(other) == {
        f"s/begun/{name}" for name in ("config.yaml", "identity.json", "checkpoint.safetensors")
    }
    stale = checkout / "results" / "s" / "done" / "checkpoint.safetensors"  # from when it came back unfinished
    stale.parent.mkdir()
    stale.touch()
    carry["unpack_back"](Namespace(back=back))
    taken = {path.relative_to(checkout / "results").as_posix() for path in checkout.glob("results/s/*/*")}
    assert taken == done | files_of_pieces(other) | {f"s/run/{name}" for name in UNFINISHED}
    assert "runs:" in (checkout / "results" / "queue.yaml").read_text(encoding="utf-8")


def test_trained_runs_that_must_be_measured_keep_their_weights(checkout: Path, tmp_path: Path) -> None:
    results, back = tmp_path / "there", tmp_path / "back"
    name = next(run.name for run in plan_runs() if run.request.corruptions)
    files = ("config.yaml", "ensemble.safetensors", "history.csv", "result.json")
    (results / name).mkdir(parents=True)
    for file in files:
        (results / name / file).write_text("")
    result = {"figures": {}, "seconds": 60, "date": "2026-11-18", "device": "NVIDIA H200", "versions": {}}
    (results / name / "result.json").write_text(json.dumps(result))
    (results / name / "history.csv").write_text(",".join(COLUMNS) + "\n")
    carry["pack_back"](results, back, 15, 60)
    assert files_in(back / "results.tar.gz") == set()
    assert files_of_pieces([back / "unfinished-0.1-of-1"]) == {f"{name}/{file}" for file in files}
    carry["unpack_back"](Namespace(back=back))
    carry["pack_all"](Namespace(out=tmp_path / "carry", packages=[], datasets=[], mib=56))
    packed = [files_of_pieces(pieces) for pieces in carry["find_unfinished"](tmp_path / "carry")]
    assert any(f"{name}/ensemble.safetensors" in files for files in packed)


def test_finished_runs_stay_packed_while_they_are_packed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, back = tmp_path / "results", tmp_path / "back"
    run = results / "s" / "run"
    run.mkdir(parents=True)
    for name in ("config.yaml", "result.json"):
        (run / name).write_text("")
    carry["pack_back"](results, back, 15, 60)
    before = (back / "results.tar.gz").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("the machine is taken away")

    monkeypatch.setitem(carry["pack_back"].__globals__, "finished_runs", fail)
    with pytest.raises(OSError, match="taken away"):
        carry["pack_back"](results, back, 15, 60)
    assert (back / "results.tar.gz").read_bytes() == before


@pytest.mark.parametrize("archive", ["unfinished-0.1-of-1", "results.tar.gz"])
def test_run_finished_here_is_not_replaced(archive: str, checkout: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    name, result = "s/twice", ("result.json",) * (archive == "results.tar.gz")
    for root, files in (
        (there / name, ("config.yaml", "evaluation-test-mean.json", "checkpoint.safetensors", *result)),
        (checkout / "results" / name, ("config.yaml", "evaluation-test-mean.json", "result.json", "elapsed.json")),
    ):
        root.mkdir(parents=True)
        for file in files:
            (root / file).write_text(f"of {root}")
    carry["pack_back"](there, back, 15, 60)
    assert f"{name}/evaluation-test-mean.json" in files_in(back / archive)
    carry["unpack_back"](Namespace(back=back))
    run = checkout / "results" / name
    assert (run / "evaluation-test-mean.json").read_text() == f"of {run}"
    assert {path.name for path in run.iterdir()} == {"config.yaml", "evaluation-test-mean.json", "result.json"}


def test_second_call_goes_on_with_the_runs_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, work = tmp_path / "carry", tmp_path / "work"
    files = {"src/a.py": "new code", "results/s/run/checkpoint.safetensors": "as packed", "results/s/other": "new"}
    packed.mkdir()
    with tarfile.open(packed / "code.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            (tmp_path / "file").write_text(text)
            archive.add(tmp_path / "file", name)
    for name in ("src/a.py", "results/s/run/checkpoint.safetensors"):
        (work / name).parent.mkdir(parents=True)
        (work / name).write_text("of the first call")
    monkeypatch.setitem(carry["run_there"].__globals__, "run_and_pack", lambda *_: None)
    monkeypatch.setitem(carry["run_there"].__globals__, "pack_back", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    carry["run_there"](
        Namespace(
            folder=packed, work=work, back=None, mps=False, workers=1, minutes=1, mib=15, unfinished_mib=60, options=[]
        )
    )
    assert {name: (work / name).read_text() for name in files} == {
        **files, "results/s/run/checkpoint.safetensors": "of the first call"
    }  # fmt: skip


def test_finished_runs_are_packed_before_the_queue_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command stands for a queue: it finishes a run and ends only when that run has been packed."""
    results, back = tmp_path / "results", tmp_path / "back"
    queue = (
        "import pathlib, sys, time; run, packed = map(pathlib.Path, sys.argv[1:]); run.mkdir(parents=True);"
        "[(run / name).write_text('') for name in ('config.yaml', 'result.json')]; end = time.monotonic() + 60\n"
        "while not packed.exists(): time.sleep(0.05); assert time.monotonic() < end"
    )
    monkeypatch.setitem(carry["run_and_pack"].__globals__, "POLL_SECONDS", 0.05)
    command = [sys.executable, "-c", queue, str(results / "s" / "run"), str(back / "results.tar.gz")]
    carry["run_and_pack"](command, dict(os.environ), results, back)
    assert files_in(back / "results.tar.gz") == {"s/run/config.yaml", "s/run/result.json"}


def test_command_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    """It is ended by SIGTERM, which reaches the program only, after it has had the time to end by itself."""
    started = tmp_path / "started"
    waiting = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    script = (
        f"import os, pathlib, runpy, signal, sys\n"
        f"run = runpy.run_path({str(ROOT / 'tools' / 'carry.py')!r})['run_and_pack']\n"
        f"run.__globals__.update(ENDING_SECONDS=0.1, finished_runs=lambda _: [])\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"run([sys.executable, '-c', {waiting!r}], dict(os.environ), pathlib.Path('r'), pathlib.Path('b'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as program:
        while not started.exists():
            time.sleep(0.05)
        before = time.monotonic()
        program.terminate()
        assert program.wait(30) == 143  # it waits for the command
        assert time.monotonic() - before < 20


def test_pack_carries_code_and_returns_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["carry.py", "pack", "--out", str(tmp_path / "carry")])
    carry["main"]()
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

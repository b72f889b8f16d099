"""Failures of `sens`: one line for expected errors, a traceback file for bugs."""

import errno
import logging
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import SafetensorError
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.storage.container import ArtifactError
from structured_ensembles.training.loop_engine import LoopEngine

QUICK = ["train", "--model", "mlp", "--epochs", "2", "--members", "2", "--method", "deep", "--quiet"]
LISTS = "structured_ensembles.cli.lists.data_sets"  # what `sens datasets` calls


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the kernel refuse to write files above a size, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error line on stderr; check that it is one line."""
    shown = capsys.readouterr().err
    assert shown.startswith("sens: ")
    assert "Traceback" not in shown
    assert "sorry" not in shown
    return shown


def test_full_disk_is_one_error_line_and_the_run_resumes_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run")]
    with largest_file(1000):  # enough for config.yaml, too little for weights
        assert main([*QUICK, *out]) == 2
    shown = refused(capsys)
    assert "the disk is full" in shown
    assert "the same command resumes from here" in shown
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert main([*QUICK, *out]) == 0
    assert main([*QUICK, "--out", str(tmp_path / "other")]) == 0
    files = [tmp_path / name / "ensemble.safetensors" for name in ("run", "other")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_full_disk_behind_stdout_is_one_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["datasets"]) == 2
    assert "the disk is full, or a limit is reached: No space left on device" in refused(capsys)


def test_closed_pipe_exits_silently(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["datasets"]) == 141
    assert capsys.readouterr().err == ""


def test_pipe_closed_during_a_long_text_exits_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that fills the buffer fails when it is written, and leaves nothing that a flush could fail with."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8", buffering=8192) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr("structured_ensembles.cli.main.format_command_help", lambda *_: "help " * 20_000)
        assert main(["train", "--help"]) == 141
    assert capsys.readouterr().err == ""


EXPECTED = [
    (OSError(errno.ENOSPC, "No space left on device", "a.json"), "full, or a limit is reached: a.json: No space"),
    (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
    (SafetensorError("Error while deserializing header"), "a file is damaged"),
    (PermissionError(errno.EACCES, "Permission denied", "a.json"), "sens: a.json: Permission denied"),
    (jinja2.UndefinedError("'dict object' has no attribute 'date'"), "no page can be written from these run folders"),
    (yaml.YAMLError("found a tab"), "a file is damaged"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "a file is damaged"),
    (MemoryError(), "not enough memory"),
    (torch.OutOfMemoryError("tried to allocate 2 GiB"), "not enough memory: tried to allocate 2 GiB"),
]


@pytest.mark.parametrize(("error", "sentence"), EXPECTED, ids=lambda value: type(value).__name__)
def test_expected_errors_are_one_line(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    monkeypatch.setattr(LISTS, fail)
    assert main(["datasets"]) == 2
    assert sentence in refused(capsys)


@pytest.mark.parametrize("error", [KeyError("seconds"), ValueError("not enough values to unpack"), AssertionError()])
def test_unexpected_error_writes_its_traceback_to_a_file(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stumble() -> int:
        raise error

    monkeypatch.setattr(LISTS, stumble)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["datasets"]) == 70
    shown = capsys.readouterr().err
    assert "sorry" in shown
    assert type(error).__name__ in shown
    assert "report it to" in shown
    assert "Traceback" not in shown
    report = Path(str(re.search(r"with the file (\S+),", shown)[1]))
    assert report.parent == tmp_path
    text = report.read_text(encoding="utf-8")
    assert text.startswith("sens datasets\n")
    assert "in stumble" in text
    assert se.__version__ in text
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))  # or a full disk
    assert main(["datasets"]) == 70
    assert "in stumble" in capsys.readouterr().err


def test_internal_errors_are_reported_as_bugs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LISTS, lambda: {"broken": None})
    assert main(["datasets"]) == 70  # an AttributeError
    monkeypatch.setattr(LISTS, dict)
    monkeypatch.setattr("structured_ensembles.cli.lists.text_table", lambda header: "")
    capsys.readouterr()
    assert main(["datasets"]) == 70  # a TypeError, though our own sentences may have that type too
    assert "sorry, this should not have happened: TypeError" in capsys.readouterr().err


def test_damaged_ensemble_file_is_one_error_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("dataset: digits\nmodel: mlp\nmethod: single\nseed: 0\n")
    (tmp_path / "ensemble.safetensors").write_bytes(b"broken")
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "is damaged" in refused(capsys)


def test_control_characters_from_files_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        warnings.simplefilter("always")
        warnings.warn("\x1b]0;owned\x07", stacklevel=1)
        raise OSError("\x1b[2J gone")

    monkeypatch.setattr(LISTS, fail)
    with warnings.catch_warnings():
        assert main(["datasets"]) == 2
    shown = capsys.readouterr().err
    assert r"\x1b[2J gone" in shown
    assert r"\x1b]0;owned\x07" in shown
    assert "\x1b" not in shown


def test_ctrl_c_mentions_resuming_only_for_resumable_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LoopEngine, "train_epoch", interrupted)
    assert main([*QUICK, "--out", str(tmp_path / "run")]) == 130
    assert "resumes from here" in capsys.readouterr().err
    monkeypatch.setattr(LISTS, interrupted)
    assert main(["datasets"]) == 130
    assert capsys.readouterr().err == "sens: stopped\n"


def test_termination_stops_a_command_as_ctrl_c_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must leave the contexts that end worker processes; a second signal must not cut that short."""
    ended = []

    def terminated(*_: Any, **__: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            ended.append(True)

    monkeypatch.setattr(LoopEngine, "train_epoch", terminated)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert main([*QUICK, "--out", str(tmp_path / "run")]) == 130
    assert ended == [True]
    assert "resumes from here" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_main_restores_warnings_path_streams_and_log_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> tuple[object, ...]:
        handlers = list(logging.getLogger("structured_ensembles").handlers)
        return warnings.showwarning, list(sys.path), sys.stdout.errors, sys.stderr.errors, handlers

    before = state()
    assert main(["datasets"]) == 0
    assert main(["train", "--model", "no.such:thing"]) == 2
    assert main(["nonsense"]) == 2
    assert state() == before


def test_log_records_are_shown_as_escaped_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lists() -> dict[str, object]:
        logging.getLogger("structured_ensembles.training.engine").warning("training goes on, \x1b[31mslower")
        return {}

    monkeypatch.setattr(LISTS, lists)
    assert main(["datasets"]) == 0
    printed = capsys.readouterr().err
    assert printed.startswith("sens: training goes on, ")
    assert "\x1b" not in printed


def test_terminal_that_cannot_encode_a_character_gets_a_replacement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "shown").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["datasets"]) == 0
    assert "8?8" in (tmp_path / "shown").read_text()  # ×


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made = se.Ensemble([se.zoo.lenet5(10, in_channels=3)], classes=[f"\x1b[31m{n}" for n in range(10)])
    made.input_shape, made.pixels = (3, 32, 32), True
    path = tmp_path_factory.mktemp("ensemble") / "ensemble.safetensors"
    made.save(path)
    return path


def damaged_pictures(folder: Path) -> list[Path]:
    """Write image files that make Pillow's readers fail in different ways."""
    good = folder / "good.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(good)
    good_bytes = good.read_bytes()
    contents = {
        "empty.png": b"",
        "cut.png": good_bytes[: len(good_bytes) // 2],
        "chunk.png": good_bytes[:60] + b"\xff" * 40 + good_bytes[100:],
        "header.png": good_bytes[:18] + b"\xff" + good_bytes[19:],  # millions of rows
        "text.jpg": b"not a picture",
        "tiff.tif": b"II*\x00\xff\xff\xff\x7f",
        "program.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n",
        "gif.gif": b"GIF89a\x01\x00\x01\x00\x80\x00\x00,",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    return [*(folder / name for name in contents), folder / "pipe.png", folder / "folder.png", folder / "nowhere.png"]


def test_unreadable_images_do_not_stop_prediction_of_the_others(
    ensemble: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = damaged_pictures(tmp_path)
    good = tmp_path / "good.png"
    assert main(["predict", str(ensemble), str(good)]) == 0
    alone = [line for line in capsys.readouterr().out.splitlines() if "good.png" in line]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of large pictures
        assert main(["predict", str(ensemble), *map(str, bad), str(good)]) == 1
    captured = capsys.readouterr()
    assert [line for line in captured.out.splitlines() if "good.png" in line] == alone
    for path in bad:
        assert f"{path} cannot be read: " in captured.err
    assert "\x1b" not in captured.out  # of the names of classes


def test_any_error_of_the_image_reader_names_the_image(
    ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_pictures(tmp_path)
    (tmp_path / "odd.png").write_bytes((tmp_path / "good.png").read_bytes())
    original = Image.open

    def opened(path: Path, **settings: Any) -> Image.Image:
        if path.name == "odd.png":
            raise SyntaxError("broken PNG file")
        return original(path, **settings)

    monkeypatch.setattr(Image, "open", opened)
    assert main(["predict", str(ensemble), str(tmp_path / "odd.png"), str(tmp_path / "good.png")]) == 1
    captured = capsys.readouterr()
    assert "odd.png cannot be read: it is damaged, or too large: broken PNG file" in captured.err
    assert "good.png" in captured.out


def test_predict_refuses_an_ensemble_that_does_not_classify_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    se.Ensemble([se.zoo.mlp(64)]).save(tmp_path / "flat")
    assert main(["predict", str(tmp_path / "flat"), "x.png"]) == 2
    assert "must be an ensemble that classifies images" in refused(capsys)


def bad_network() -> nn.Module:
    raise ArtifactError("from the user's code")


def test_error_in_user_code_is_in_the_traceback_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["train", "--model", "tests.cli.test_failures:bad_network", "--out", str(tmp_path / "run")]) == 70
    assert "unless your own code is the cause" in capsys.readouterr().err
    assert "in bad_network" in next(tmp_path.glob("sens-*.txt")).read_text()

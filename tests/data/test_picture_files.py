"""Pictures are decoded ahead by threads: in order, few at a time, without leaks; a picture that vanishes is named."""

import copy
import gc
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.data import picture_files
from structured_ensembles.data.picture_files import PictureFiles, PictureSplit
from structured_ensembles.data.worker_threads import PREFIX
from tests.support.paths import ROOT
from tests.support.picture_folder import write_shapes

INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in children of background jobs
import structured_ensembles as se
split = se.Data.from_folder(sys.argv[1], cache_bytes=0, workers=2).train
while True:
    for _ in split.batches(8, seed=1):
        print("batch", flush=True)
"""


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    return write_shapes(tmp_path / "shapes", count=20)


def streamed(folder: Path, workers: int = 2) -> PictureSplit:
    split = se.Data.from_folder(folder, validation=0, cache_bytes=0, workers=workers).train
    assert isinstance(split, PictureSplit)
    return split


def decoding() -> list[threading.Thread]:
    """List the threads that decode, after a moment in which those that were told to end do so."""
    for _ in range(200):
        threads = [thread for thread in threading.enumerate() if thread.name.startswith(PREFIX)]
        if not threads:
            break
        time.sleep(0.005)
    return threads


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_come_in_the_order_asked_for(shapes: Path, workers: int) -> None:
    split = streamed(shapes, workers)
    whole = se.Data.from_folder(shapes, validation=0).train
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:50]
    sizes = [1, 30, 17, 2]
    for (images, labels), rows in zip(split.stream(order, sizes), order.split(sizes), strict=True):
        assert torch.equal(images, whole.inputs[rows])  # type: ignore[attr-defined]
        assert torch.equal(labels, whole.targets[rows])  # type: ignore[attr-defined]


def test_threads_end_with_the_pass(shapes: Path) -> None:
    split = streamed(shapes)
    assert not decoding()
    one, other = split.batches(4, seed=1), split.batches(4, seed=2)
    next(one)
    next(other)
    running = [thread for thread in threading.enumerate() if thread.name.startswith(PREFIX)]
    assert 1 <= len(running) <= 2  # shared by both passes
    one.close()  # type: ignore[attr-defined]
    assert len(list(other)) == 14  # goes on without the first
    assert not decoding()
    next(split.batches(4))  # dropped at once
    assert not decoding()
    held = split.batches(4)
    next(held)
    del held
    gc.collect()
    assert not decoding()


def test_threads_end_when_the_consumer_fails(shapes: Path) -> None:
    split = streamed(shapes)

    def interrupted() -> None:
        for _ in split.batches(4):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not decoding()


def test_few_pictures_are_decoded_ahead(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_files, "PIECE", 2)
    decoded: list[int] = []
    decode = PictureFiles.decode

    def counting(self: PictureFiles, row: int) -> object:
        decoded.append(row)
        return decode(self, row)

    monkeypatch.setattr(PictureFiles, "decode", counting)
    for size, most in ((1, 1 + 8), (2, 2 + 8), (10, 30)):  # two pieces for each thread, or two batches, wait
        decoded.clear()
        batches = streamed(shapes).batches(size)
        next(batches)
        time.sleep(0.05)
        assert size <= len(decoded) <= most
        batches.close()  # type: ignore[attr-defined]


def test_a_vanished_picture_is_named(shapes: Path) -> None:
    split = streamed(shapes)
    (shapes / "disc" / "007.png").unlink()
    with pytest.raises(OSError, match=r"disc/007\.png cannot be read any more"):
        list(split.batches(8))
    assert not decoding()
    shutil.copy(shapes / "disc" / "008.png", shapes / "disc" / "007.png")
    assert len(list(split.batches(8))) == 8


def test_a_picture_of_another_size_is_named(shapes: Path, tmp_path: Path) -> None:
    split = streamed(shapes)
    other = write_shapes(tmp_path / "other", count=1, side=30)
    shutil.copy(other / "disc" / "000.png", shapes / "disc" / "007.png")
    with pytest.raises(OSError, match=r"007\.png has changed: it has the shape \(3, 30, 30\), not \(3, 24, 24\)"):
        list(split.batches(8))


def test_splits_can_be_copied_and_sent(shapes: Path) -> None:
    split = streamed(shapes)
    expected = torch.cat([images for images, _ in split.batches(16, seed=3)])
    for other in (copy.deepcopy(split), pickle.loads(pickle.dumps(split)), split.to("cpu")):
        assert torch.equal(torch.cat([images for images, _ in other.batches(16, seed=3)]), expected)


@pytest.fixture
def interrupted(shapes: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program that reads pictures for ever."""
    command = [sys.executable, "-c", INTERRUPTED, str(shapes)]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def test_control_c_ends_the_program(interrupted: subprocess.Popen[str]) -> None:
    assert interrupted.stdout is not None
    assert interrupted.stdout.readline() == "batch\n"
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=30)
    assert interrupted.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")

"""Measure how fast a folder of pictures is read: our threads, processes and cache beside a plain DataLoader.

    python benchmarks/folder.py [--pictures 4000] [--side 64] [--workers 2] [--json benchmarks/results/folder-cpu.json]
    python benchmarks/folder.py --pictures 400 --stored 480 --suffix jpg --json benchmarks/results/folder-jpeg-cpu.json

Pictures are generated: smooth colours with noise, so that a PNG is about as large as one of a photograph. --stored is
their side in the files, if it is another than that of the pixels. Every reader gives shuffled batches of uint8 pixels.
The last lines estimate what threads reach on more cores: Python's lock bounds them, by the time that a picture of one
pixel takes.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import structured_ensembles as se
from recording import arguments_of, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.picture_files import PIECE, PictureSplit
from structured_ensembles.data.pictures import decode_picture, read_content

CORES = 16  # of the estimate
CLASSES = 10
Row = dict[str, float]


class ImageFolder(Dataset[Any]):
    """What torchvision's ImageFolder with Resize and PILToTensor does: open, convert, resize, copy to a tensor."""

    def __init__(self, root: Path, side: int) -> None:
        self.side = side
        self.files = sorted((file, int(file.parent.name)) for file in root.glob("*/*"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[row]
        with path.open("rb") as file:
            picture = Image.open(file).convert("RGB")
        if picture.size != (self.side, self.side):
            picture = picture.resize((self.side, self.side), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous(), label


def write_pictures(root: Path, count: int, side: int, suffix: str) -> int:
    """Write picture files, a folder for each class; return their mean size in bytes."""
    generator = np.random.default_rng(0)
    total = 0
    for number in range(count):
        colours = generator.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(colours).resize((side, side), Image.Resampling.BICUBIC)).astype(float)
        pixels = (smooth + generator.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
        path = root / str(number % CLASSES) / f"{number}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
        total += path.stat().st_size
    return total // count


def decode_files(paths: list[Path], side: int) -> np.ndarray:
    """Decode a piece of a batch in another process: uint8 (pictures, 3, side, side)."""
    return np.stack([decode_picture(path.read_bytes(), side) for path in paths])


def by_processes(split: PictureSplit, size: int, pool: ProcessPoolExecutor) -> Iterable[torch.Tensor]:
    """Read a shuffled epoch as `PictureSplit.batches` does, but by processes, which send their pixels."""
    paths = [split.inputs.root / name for name in split.inputs.names]
    rows = split.index[torch.randperm(len(split))].tolist()
    pieces = [[paths[row] for row in rows[start : start + PIECE]] for start in range(0, len(rows), PIECE)]
    results = pool.map(decode_files, pieces, [split.inputs.shape[1]] * len(pieces))
    while batch := list(islice(results, size // PIECE)):
        yield torch.from_numpy(np.concatenate(batch))


def measure_reader(read: Callable[[], Iterable[Any]], count: int) -> Row:
    """Return the pictures per second, and per second of processor time, of the best of five passes each.

    Other programs only slow a pass down; its processor time, that of worker processes included, they hardly change.
    """
    seconds, processor = [], []
    for _ in range(5):
        start, used = time.perf_counter(), processor_seconds()
        for _ in read():
            pass
        seconds.append(time.perf_counter() - start)
        processor.append(processor_seconds() - used)
    return {"per_second": count / min(seconds), "per_processor_second": count / min(processor)}


def processor_seconds() -> float:
    """Return the processor time of this process and of all processes below it, from Linux's /proc."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            parents[process], used[process] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = [os.getpid()]
    for process in family:  # grows while it is read
        family += [child for child, parent in parents.items() if parent == process]
    children = sum(used[process] for process in family[1:])
    return time.process_time() + children / os.sysconf("SC_CLK_TCK")


def seconds_under_lock() -> float:
    """Return the seconds that a picture of one pixel takes: nearly all of it holds Python's lock."""
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pixel.png")
        path.write_bytes(buffer.getvalue())
        target = np.empty((3, 1, 1), np.uint8)
        start = time.process_time()
        for _ in range(2000):
            target[:] = decode_picture(read_content(path.parent, path.name), 1)
        return (time.process_time() - start) / 2000


def main() -> None:
    """Generate the pictures, measure every reader and print the table."""
    arguments = arguments_of(
        __doc__, only_cpu=True, pictures=4000, side=64, batch=128, workers=2, stored=0, suffix="png"
    )
    stored = arguments.stored or arguments.side
    torch.set_num_threads(1)
    load = os.getloadavg()[0]  # above 0, other programs take a share of the cores
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = write_pictures(root, arguments.pictures, stored, arguments.suffix)
        rows = measure(root, arguments.pictures, arguments.side, arguments.batch, arguments.workers)
    locked = min(seconds_under_lock() for _ in range(5))
    core = rows["ours, 1 thread"]["per_processor_second"]
    estimate = min(CORES * core, 1 / locked)
    files = f"{arguments.pictures} {arguments.suffix} files of {stored}×{stored} pixels, {size} bytes each"
    print(f"{files}, read as {arguments.side}×{arguments.side}; {os.cpu_count()} cores, load {load:.1f}\n")
    cells = [(name, *(f"{value:,.0f}" for value in row.values())) for name, row in rows.items()]
    print(text_table(("reader", "pictures/s", "pictures/s of processor time"), cells))
    print(f"\nPython's lock is held for at most {1e6 * locked:.0f} µs of a picture: {1 / locked:,.0f} pictures/s")
    print(f"estimate for {CORES} cores, the smaller of that and {CORES} × {core:,.0f}: {estimate:,.0f} pictures/s")
    figures = {
        "readers": rows,
        "load_before": load,
        "bytes_per_picture": size,
        "microseconds_under_lock": 1e6 * locked,
        f"estimated_pictures_per_second_on_{CORES}_cores": estimate,
    }
    record(arguments, figures)


def measure(root: Path, count: int, side: int, batch: int, workers: int) -> dict[str, Row]:
    """Measure every reader, by name."""
    rows: dict[str, Row] = {}
    open_folder = partial(se.Data.from_folder, root, size=side, validation=0)
    rows["ours, first look: decode, check, fingerprint"] = measure_reader(lambda: [open_folder(workers=workers)], count)
    rows["ours, cached"] = measure_reader(partial(open_folder().train.batches, batch, 1), count)
    for threads in dict.fromkeys((1, workers)):
        split = open_folder(workers=threads, cache_bytes=0).train
        assert isinstance(split, PictureSplit)
        rows[f"ours, {threads} thread{'s' * (threads > 1)}"] = measure_reader(partial(split.batches, batch, 1), count)
    for processes in dict.fromkeys((1, workers)):
        with ProcessPoolExecutor(processes, get_context("forkserver")) as pool:
            name = f"our decoder, {processes} process{'es' * (processes > 1)}"
            rows[name] = measure_reader(partial(by_processes, split, batch, pool), count)
    dataset = ImageFolder(root, side)
    for processes in (0, workers):
        loader = DataLoader(dataset, batch, shuffle=True, num_workers=processes, persistent_workers=processes > 0)
        rows[f"DataLoader, ImageFolder, {processes} workers"] = measure_reader(partial(iter, loader), count)
    return rows


if __name__ == "__main__":
    main()

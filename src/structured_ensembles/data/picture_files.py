"""PictureFiles: pictures in files, decoded by threads ahead of their use; and the split that reads them.

Threads, not processes: Pillow releases Python's lock while it decodes. In a second of processor time, threads read
about 5,000 PNGs of 64×64 pixels, processes, which have to send their pixels, 3,900, a DataLoader's workers 3,500; of
photographs of 480×480 pixels in JPEG about 1,000, 900 and 500 (benchmarks/folder.py; recorded in
benchmarks/results/folder-cpu.json and folder-jpeg-cpu.json). Threads start at once and need neither picklable data nor
`if __name__ == "__main__"`. The price: a picture holds the lock for up to 48 µs, so that all threads together read at
most about 21,000 per second. Photographs reach that with more than 20 cores; small pictures mostly fit in memory.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structured_ensembles.common.plurals import counted
from structured_ensembles.data.drawing import Seed, shuffle
from structured_ensembles.data.pictures import decode_picture, read_content
from structured_ensembles.data.splits import Batch, batch_sizes
from structured_ensembles.data.worker_threads import decoding_threads
from structured_ensembles.storage.fingerprints import add_tensor

PIECE = 16  # pictures that a thread decodes at a time
AHEAD = 2  # batches, at least, that are decoded ahead of the step


@dataclass(frozen=True, repr=False)
class PictureFiles:
    """Pictures in files, all decoded to the same shape.

    names: below `root`. shape: (channels, height, width). size: that of `decode_picture`. digests: the SHA-256 of each
    file's content, uint8 (pictures, 32). kept: the first pictures, decoded, (kept, channels, height, width).
    """

    root: Path
    names: tuple[str, ...]
    shape: tuple[int, int, int]
    size: int | None
    digests: Tensor
    kept: Tensor
    workers: int

    def __repr__(self) -> str:
        return f"PictureFiles({counted(len(self.names), 'picture')} below {self.root}, uint8 of shape {self.shape})"

    def decode(self, row: int) -> np.ndarray:
        """Decode one picture to uint8 (channels, height, width); raise an OSError that names it if that fails."""
        try:
            pixels = decode_picture(read_content(self.root, self.names[row]), self.size, self.shape[0])
        except OSError as error:
            path = self.root / self.names[row]
            raise OSError(
                f"{path} cannot be read any more, though it could when the data were made: {error}"
            ) from error
        if pixels.shape != self.shape:
            path = self.root / self.names[row]
            raise OSError(f"{path} has changed: it has the shape {pixels.shape}, not {self.shape} as before")
        return pixels

    def read(self, rows: Tensor) -> Tensor:
        """Decode some pictures, by their rows (count,), to uint8 (count, channels, height, width)."""
        (images,) = self.read_ahead(rows, [len(rows)])
        return images

    def read_ahead(self, order: Tensor, sizes: Sequence[int], pinned: bool = False) -> Iterator[Tensor]:
        """Yield consecutive batches of these sizes, uint8 (size, channels, height, width), decoded ahead by threads.

        order: the rows of the pictures, (samples,). pinned: in memory that a GPU can copy from by itself.
        At most `AHEAD` batches wait, or as many as keep all threads busy.
        """
        limit = max(AHEAD, -(-2 * self.workers * PIECE // max(sizes, default=1)))
        waiting: deque[tuple[Tensor, list[Future[None]]]] = deque()
        with decoding_threads(self.workers) as pool:
            try:
                for rows in order.split(list(sizes)):
                    images = torch.empty((len(rows), *self.shape), dtype=torch.uint8, pin_memory=pinned)
                    pieces = zip(rows.split(PIECE), images.split(PIECE), strict=True)
                    waiting.append((images, [pool.submit(self._decode_piece, *piece) for piece in pieces]))
                    if len(waiting) > limit:
                        yield _finish(*waiting.popleft())
                while waiting:
                    yield _finish(*waiting.popleft())
            finally:
                for _, futures in waiting:
                    for future in futures:
                        future.cancel()

    def _decode_piece(self, rows: Tensor, images: Tensor) -> None:
        """Copy or decode some pictures to their place in a batch."""
        pixels, kept = images.numpy(), self.kept.numpy()
        for position, row in enumerate(rows.tolist()):
            pixels[position] = kept[row] if row < len(kept) else self.decode(row)


def _finish(images: Tensor, futures: Sequence[Future[None]]) -> Tensor:
    """Wait until a batch is decoded; raise the first error of its pictures."""
    for future in futures:
        future.result()
    return images


@dataclass(frozen=True, repr=False)
class PictureSplit:
    """Some pictures in files, labels of all of them (stored,), and the index of each in this split, (samples,).

    It has the order, batches and numbers of a `TensorSplit` of the same pictures, without all of them in memory.
    """

    inputs: PictureFiles
    targets: Tensor
    index: Tensor

    def __repr__(self) -> str:
        pictures = counted(len(self), "picture")
        return f"PictureSplit({pictures}, uint8 of shape {self.inputs.shape}, decoded when they are used)"

    def __len__(self) -> int:
        return len(self.index)

    def num_batches(self, size: int) -> int:
        return -(-len(self) // size)

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        order = self.index if seed is None else shuffle(self.index, seed)
        return self.stream(order, batch_sizes(len(self), size), device)

    def stream(self, order: Tensor, sizes: Sequence[int], device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yield batches of these sizes on a device, of the stored samples in this order."""
        pinned = torch.device(device).type == "cuda"
        batches = self.inputs.read_ahead(order, sizes, pinned)
        for images, rows in zip(batches, order.split(list(sizes)), strict=True):
            yield images.to(device, non_blocking=pinned), self.targets[rows].to(device)

    def read(self, rows: Tensor) -> Batch:
        """Read stored samples by their rows (count,)."""
        return self.inputs.read(rows), self.targets[rows]

    def to(self, device: torch.device | str) -> PictureSplit:
        """Return itself: batches are moved one by one."""
        return self

    def fingerprint(self) -> str:
        """Compute a fingerprint of the contents of all files, in the order of the split, and of their labels.

        Names do not count, but for the order that follows from them: a copy of the folder elsewhere is the same data.
        """
        hashed = hashlib.sha256(f"PictureSplit {len(self)} {self.inputs.shape} {self.inputs.size}".encode())
        for tensor in (self.inputs.digests, self.targets):
            add_tensor(hashed, tensor, self.index)
        return hashed.hexdigest()

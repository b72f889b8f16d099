"""Decode all pictures of a listing once: find those that cannot be read, and measure and keep the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from structured_ensembles.data.folder_layout import Listing
from structured_ensembles.data.normalization import count_values
from structured_ensembles.data.picture_files import PictureFiles
from structured_ensembles.data.pictures import decode_picture, read_content
from structured_ensembles.data.worker_threads import decoding_threads

PIECE = 64  # pictures that a thread decodes at a time


@dataclass(frozen=True)
class Scan:
    """The pictures of a listing, readable or not.

    labels: of all, (pictures,). readable: the rows of those that can be read. counts: how often each value occurs in
    each channel, (channels, 256). unreadable: the path of each such file, and the reason.
    """

    files: PictureFiles
    labels: Tensor
    readable: Tensor
    counts: Tensor
    unreadable: tuple[tuple[Path, str], ...]


def first_shape(listing: Listing, size: int | None, channels: int) -> tuple[int, int, int]:
    """Return the shape (channels, height, width) of all pictures: a square of `size`, or that of the first readable."""
    if size is not None:
        return channels, size, size
    reasons = []
    for name in listing.names:
        try:
            _, height, width = decode_picture(read_content(listing.root, name), None, channels).shape
        except OSError as error:
            reasons.append(f"{name} ({error.strerror or error})")
            continue
        return channels, height, width
    raise ValueError(f"none of the {len(listing):,} pictures below {listing.root} can be read, such as {reasons[0]}")


def scan_pictures(
    listing: Listing,
    shape: tuple[int, int, int],
    size: int | None,
    workers: int,
    keep: int,
    advance: Callable[[], None],
) -> Scan:
    """Decode every picture of a listing, and keep the first `keep`, zeros for unreadable ones.

    advance: called for every piece, see `count_pieces`.

    Raises a ValueError at the first picture of another shape, which only size=None allows.
    """
    Image.init()  # loads Pillow's readers, before threads do so at the same time
    kept = torch.zeros((min(keep, len(listing)), *shape), dtype=torch.uint8)
    digests = torch.zeros((len(listing), 32), dtype=torch.uint8)
    counts = torch.zeros((shape[0], 256), dtype=torch.int64)
    readable = torch.ones(len(listing), dtype=torch.bool)
    unreadable: list[tuple[Path, str]] = []

    def scan_piece(rows: Sequence[int]) -> tuple[Tensor, list[tuple[int, str]]]:
        """Decode some pictures; return the counts of their values, and the unreadable ones with the reason."""
        decoded, failures = [], []
        for row in rows:
            try:
                content = read_content(listing.root, listing.names[row])
                pixels = decode_picture(content, size, shape[0])
            except OSError as error:
                failures.append((row, error.strerror or str(error)))
                continue
            if pixels.shape != shape:
                raise ValueError(_describe_other_size(listing, row, pixels.shape, shape))
            digests[row] = torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)
            decoded.append(pixels)
            if row < len(kept):
                kept[row] = torch.from_numpy(pixels)
        if not decoded:
            return torch.zeros_like(counts), failures
        return count_values(torch.from_numpy(np.stack(decoded))), failures

    pieces = [range(start, min(start + PIECE, len(listing))) for start in range(0, len(listing), PIECE)]
    with decoding_threads(workers) as pool:
        for piece_counts, failures in pool.map(scan_piece, pieces):
            counts += piece_counts
            for row, reason in failures:
                readable[row] = False
                unreadable.append((listing.root / listing.names[row], reason))
            advance()
    files = PictureFiles(listing.root, listing.names, shape, size, digests, kept, workers)
    return Scan(files, torch.tensor(listing.labels), readable.nonzero().flatten(), counts, tuple(unreadable))


def count_pieces(listing: Listing) -> int:
    """Return how often `scan_pictures` advances."""
    return -(-len(listing) // PIECE)


def _describe_other_size(listing: Listing, row: int, other: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Describe a picture whose size is not that of the others."""
    sizes = [f"{width}×{height}" for _, height, width in (other, shape)]
    return (
        f"pictures below {listing.root} must all have the same size, but {listing.names[row]} has {sizes[0]} pixels "
        f"and others have {sizes[1]}: give the size= that they shall be resized to"
    )

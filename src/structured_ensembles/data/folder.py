"""read_folder(): pictures in a folder for each class, kept in memory if they fit, else decoded when they are used."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor

from structured_ensembles.common.checks import check_choice, check_seed, check_whole
from structured_ensembles.common.progress import progress
from structured_ensembles.data.folder_layout import Listing, find_splits, list_classes, list_pictures
from structured_ensembles.data.normalization import Choice, Normalization, normalization_for
from structured_ensembles.data.picture_files import PictureSplit
from structured_ensembles.data.picture_scan import Scan, count_pieces, first_shape, scan_pictures
from structured_ensembles.data.splits import Split, TensorSplit, hold_out
from structured_ensembles.data.worker_threads import available_cores

CACHE_BYTES = 2 * 2**30
VALIDATION = 0.1  # the share that is held out where there is no folder
MAX_NAMED = 3  # unreadable pictures that are named
log = logging.getLogger(__name__)

Source = float | str | Path | None  # of a split: a share of the training pictures, a folder, or the default


@dataclass(frozen=True)
class Folder:
    """The contents of a folder of pictures."""

    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split | None
    normalization: Normalization | None


def read_folder(
    path: Path,
    size: int | None,
    channels: int,
    test: Source,
    validation: Source,
    seed: int,
    normalization: Choice,
    workers: int | None,
    cache_bytes: int,
) -> Folder:
    """Read a folder of pictures; see `Data.from_folder`."""
    check_whole("size", size, or_none=True)
    check_choice("channels", channels, (1, 3))
    check_whole("workers", workers, or_none=True)
    check_whole("cache_bytes", cache_bytes, least=0)
    check_seed(seed)
    path = path.expanduser()
    folders = find_splits(path)
    sources = {"test": test, "validation": validation}
    sources = {split: folders.get(split) if source is None else source for split, source in sources.items()}
    shares = {split: _check_share(split, source) for split, source in sources.items()}
    if sources["validation"] is None:
        shares["validation"] = VALIDATION
    classes = list_classes(folders["train"])
    listings = _list_splits(folders["train"], sources, classes)
    if shares["test"]:
        listings |= _hold_out_test(listings["train"], shares["test"])
    shape = first_shape(listings["train"], size, channels)
    moments = _resolve_chosen(normalization, shape)  # raises before any work
    scans = _scan(path, listings, shape, size, workers or available_cores(), cache_bytes)
    _check_readable(scans, classes)
    train = scans["train"]
    kept, held_out = hold_out(train.labels[train.readable], shares["validation"], seed)
    splits = {split: _make_split(scan, scan.readable) for split, scan in scans.items()}
    splits["train"] = _make_split(train, train.readable[kept])
    if len(held_out):
        splits["validation"] = _make_split(train, train.readable[held_out])
    if _is_measured(normalization):
        moments = Normalization.from_counts(train.counts)
    return Folder(classes, splits["train"], splits.get("validation"), splits.get("test"), moments)


def _list_splits(train: Path, sources: Mapping[str, Source], classes: Sequence[str]) -> dict[str, Listing]:
    """Find the pictures of training, and those of every other split that has a folder."""
    others = {split: Path(source) for split, source in sources.items() if isinstance(source, str | Path)}
    return {
        "train": list_pictures("path", train, classes),
        **{split: list_pictures(split, folder.expanduser(), classes) for split, folder in others.items()},
    }


def _hold_out_test(train: Listing, share: float) -> dict[str, Listing]:
    """Divide the training pictures into those that stay and a test split, by seed 0: the same in every run."""
    kept, held_out = hold_out(torch.tensor(train.labels), share, seed=0)
    if not len(held_out):
        raise ValueError(
            f"test={share} is less than a picture of each class below {train.root}, so that no picture would be in the "
            "test split: give a larger share, a folder, or more pictures"
        )
    return {"train": train.select(kept.tolist()), "test": train.select(held_out.tolist())}


def _scan(
    path: Path,
    listings: Mapping[str, Listing],
    shape: tuple[int, int, int],
    size: int | None,
    workers: int,
    cache_bytes: int,
) -> dict[str, Scan]:
    """Decode all pictures once, keep as many as fit in memory, and log how many, and which cannot be read."""
    count = sum(map(len, listings.values()))
    room = cache_bytes // math.prod(shape)  # pictures that fit
    with progress("reading pictures", sum(map(count_pieces, listings.values()))) as advance:
        scans = {}
        for split, listing in listings.items():
            scans[split] = scan_pictures(listing, shape, size, workers, room, advance)
            room -= len(scans[split].files.kept)
    kept = sum(len(scan.files.kept) for scan in scans.values())
    others = f", the other {count - kept:,} are decoded by {workers} threads when they are used" if kept < count else ""
    log.info("%d of %d pictures below %s are kept in memory%s", kept, count, path, others)
    unreadable = [failure for scan in scans.values() for failure in scan.unreadable]
    if unreadable:
        log.warning(
            "%d of %d pictures below %s cannot be read and are left out: %s",
            len(unreadable),
            count,
            path,
            "; ".join(f"{file} ({reason})" for file, reason in unreadable[:MAX_NAMED])
            + (", …" if len(unreadable) > MAX_NAMED else ""),
        )
    return scans


def _check_readable(scans: Mapping[str, Scan], classes: Sequence[str]) -> None:
    """Raise a ValueError if no picture of a split, or no training picture of a class, can be read."""
    for split, scan in scans.items():
        if not len(scan.readable):
            file, reason = scan.unreadable[0]
            raise ValueError(f"no picture of the {split} split can be read, such as {file} ({reason})")
    readable = set(scans["train"].labels[scans["train"].readable].tolist())
    if missing := [name for label, name in enumerate(classes) if label not in readable]:
        raise ValueError(f"no training picture of class {missing[0]!r} can be read: repair them, or remove its folder")


def _make_split(scan: Scan, index: Tensor) -> Split:
    """Make a split of some pictures: of their pixels if all are kept, else of their files."""
    if len(scan.files.kept) == len(scan.labels):
        return TensorSplit(scan.files.kept, scan.labels, index)
    return PictureSplit(scan.files, scan.labels, index)


def _check_share(argument: str, source: Source) -> float:
    """Return the share of the training pictures that a split gets: 0 for a folder, or None."""
    if source is None or isinstance(source, str | Path):
        return 0.0
    if not isinstance(source, Real) or not 0 <= float(source) < 1:
        raise ValueError(f"{argument} must be a folder, or a share of at least 0 and less than 1, not {source!r}")
    return float(source)


def _is_measured(choice: Choice) -> bool:
    """Tell whether a normalisation is measured on the pictures."""
    return isinstance(choice, str) and choice in ("auto", "standard")


def _resolve_chosen(choice: Choice, shape: tuple[int, int, int]) -> Normalization | None:
    """Resolve a normalisation that is not measured on the pictures; raise a ValueError for an invalid one."""
    return None if _is_measured(choice) else normalization_for(choice, torch.empty((0, *shape), dtype=torch.uint8))

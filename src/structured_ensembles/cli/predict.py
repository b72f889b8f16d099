"""`sens predict`: the ensemble's classes of images, with their uncertainty, as a table, CSV or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from structured_ensembles.cli.predictions import Prediction, describe_predictions, format_predictions
from structured_ensembles.common.inputs import is_several
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.tables import escape_control_characters
from structured_ensembles.data.arrays import convert_image
from structured_ensembles.data.pictures import SUFFIXES, convert_mode, crop_middle, open_picture
from structured_ensembles.ensemble import Ensemble

BATCH = 64  # pictures that are predicted together


def predict(
    run: Path, images: list[Path], format: Literal["table", "csv", "json"] = "table", trust_code: bool = False
) -> int:
    """Classify images, and mark those the ensemble is too unsure of.

    Args:
        run: a run folder of sens train, or an ensemble's file
        images: picture files (PNG, JPEG, WebP, …), or folders of them; of those of another size the middle is cut out
            and resized, with a note
        format: a table to read, or CSV or JSON for other programs, on stdout
        trust_code: let the file import the function that builds its network

    """
    ensemble = _load(run, trust_code)
    shape = ensemble.input_shape
    if ensemble.task != "classification" or shape is None or is_several(shape) or len(shape) != 3:
        raise ValueError(
            f"{run} must be an ensemble that classifies images, not one whose inputs have the shape {shape}"
        )
    predictions: list[Prediction] = []
    waiting: list[tuple[Path, Tensor, str]] = []
    unreadable = 0
    for path, error in _list_pictures(images):
        try:
            if error:
                raise OSError(error)
            waiting.append((path, *read_picture(path, shape)))
        except OSError as reason:
            sentence = f"{path} cannot be read: {reason.strerror or reason}"
            print(f"sens: {escape_control_characters(sentence)}", file=sys.stderr)
            unreadable += 1
        if len(waiting) == BATCH:
            predictions += _predict_batch(ensemble, waiting)
            waiting = []
    predictions += _predict_batch(ensemble, waiting) if waiting else []
    if predictions or format != "table":
        print(format_predictions(predictions, ensemble, format))
    return 1 if unreadable else 0


def _load(run: Path, trust_code: bool) -> Ensemble:
    """Load the ensemble of a run folder or of a file."""
    path = run / "ensemble.safetensors" if run.is_dir() else run
    if run.is_dir() and not path.exists() and (run / "config.yaml").exists():
        raise ValueError(
            f"{run} is not done yet, or its file is lost: it has no {path.name}; give the command that began it again "
            "to resume it"
        )
    if run.is_dir() and not path.exists():
        raise ValueError(f"{run} must be a run folder of sens train, or an ensemble's file: it has no {path.name}")
    return Ensemble.load(path, trust_code=trust_code)


def _list_pictures(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield files, and the pictures of folders in the order of their names; or a folder and why it gives none."""
    for path in paths:
        if not path.is_dir():
            yield path, ""
            continue
        pictures = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        yield from ((picture, "") for picture in pictures)
        if not pictures:
            yield path, f"the folder has no pictures ({', '.join(SUFFIXES)})"


def _predict_batch(ensemble: Ensemble, waiting: Sequence[tuple[Path, Tensor, str]]) -> list[Prediction]:
    """Predict pictures together: path, pixels (channels, height, width) and note of each."""
    logits = ensemble.logits(torch.stack([pixels for _, pixels, _ in waiting]), batch_size=BATCH)
    return describe_predictions(ensemble, logits, [(str(path), note) for path, _, note in waiting])


def read_picture(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """Read an image as uint8 pixels of `shape` (channels, height, width), and note changes; or raise an OSError."""
    channels, height, width = shape
    notes = []
    picture = _decode(path)
    if picture.has_transparency_data:
        notes.append("transparent parts are white")
    picture = convert_mode(picture, channels)
    if picture.size != (width, height):
        cropped = "cut out of the middle and " if picture.width * height != picture.height * width else ""
        notes.append(f"{cropped}resized from {picture.width}×{picture.height} to {width}×{height}")
        picture = crop_middle(picture, width, height, Image.Resampling.LANCZOS)
    pixels = convert_image(picture)
    if pixels.shape[0] != channels:
        raise OSError(f"the ensemble takes {counted(channels, 'channel')}, not {pixels.shape[0]}")
    return pixels.to(torch.uint8), ", ".join(notes)


def _decode(path: Path) -> Image.Image:
    """Decode an image, turned as a viewer shows it; raise an OSError if it cannot be decoded."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")  # a folder, or a pipe that might never end
    Image.init()
    return open_picture(path, [name for name in Image.ID if name != "EPS"])  # EPS is a program

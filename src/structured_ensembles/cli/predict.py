"""`sens predict`: what an ensemble says about pictures, and whether it knows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from structured_ensembles.data.arrays import image_tensor
from structured_ensembles.ensemble import Ensemble, combined, uncertainty_of
from structured_ensembles.several import is_several
from structured_ensembles.tables import text_table


def predict(run: Path, images: list[Path], trust_code: bool = False) -> int:
    """Classify pictures; those the ensemble is too unsure of are marked.

    Args:
        run: a run folder of sens train, or an ensemble's file
        images: PNG or JPEG files; another size is resized, and said so
        trust_code: let the file import the function that makes its network

    """
    ensemble = Ensemble.load(run / "ensemble.safetensors" if run.is_dir() else run, trust_code=trust_code)
    shape = ensemble.input_shape
    if ensemble.task != "classification" or shape is None or is_several(shape) or len(shape) != 3:
        raise ValueError(f"{run} does not classify pictures: its inputs have the shape {shape}")
    rows, unreadable = [], 0
    for path in images:
        try:
            pixels, note = read_picture(path, shape)
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            print(f"sens: {path} cannot be read: {error}", file=sys.stderr)
            unreadable += 1
            continue
        logits = ensemble.logits(pixels[None])
        probability, label = combined(logits)[0].max(-1)
        unsure = uncertainty_of(logits)
        entropy, information = float(unsure.entropy[0]), float(unsure.mutual_information[0])
        verdict = "keep" if ensemble.threshold is None or entropy <= ensemble.threshold else "discard"
        name = ensemble.classes[int(label)] if ensemble.classes else str(int(label))
        figures = (f"{100 * float(probability):.1f} %", f"{entropy:.3f}", f"{information:.3f}")
        rows.append((str(path), name, *figures, verdict, note))
    if rows:
        print(text_table(("picture", "class", "probability", "entropy", "disagreement", "verdict", ""), rows))
    if rows and ensemble.threshold is not None:
        print(
            f"\ndiscard: the entropy is above {ensemble.threshold:.3f}, where it is for a quarter of what it gets right"
        )
    return 1 if unreadable else 0


def read_picture(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """A picture as uint8 pixels of `shape` (channels, height, width), and what was done to it."""
    channels, height, width = shape
    notes = []
    with Image.open(path) as opened:
        opened.load()
        picture = _eight_bits(ImageOps.exif_transpose(opened))  # the right way up, as a viewer shows it
    if picture.has_transparency_data:
        notes.append("transparent parts are white")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    picture = picture.convert("L" if channels == 1 else "RGB")
    if picture.size != (width, height):
        notes.append(f"resized from {picture.size[0]}×{picture.size[1]} to {width}×{height}")
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    pixels = image_tensor(picture)
    if pixels.shape[0] != channels:
        raise OSError(f"the ensemble wants {channels} channels")
    return pixels.to(torch.uint8), ", ".join(notes)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Of one that has more, the upper eight; Pillow would cut off whatever is above 255."""
    if picture.mode == "F":
        raise OSError("its pixels are floats, and nothing says from where to where")
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise OSError(f"its pixels go from {values.min()} to {values.max()}: they must have 8 or 16 bits")
    deep = picture.mode != "I" or values.max() > 255  # some readers give 16 bits as 32
    return Image.fromarray((values // 257 if deep else values).astype(np.uint8))

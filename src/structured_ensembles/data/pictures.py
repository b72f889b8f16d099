"""Decode picture files: any mode, bit depth and orientation, cropped in the middle to the size that is asked for."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
DRAFT = 2  # a JPEG decoder may shrink a picture itself, down to this many times the size that is asked for


def read_content(root: Path, name: str) -> bytes:
    """Read a regular file below a folder; raise an OSError for anything else: to open a pipe would wait for a writer.

    Plain strings and no buffer: pathlib would hold Python's lock twice as long.
    """
    path = f"{root}/{name}"
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file")
    with open(path, "rb", buffering=0) as file:
        return file.read()


def decode_picture(content: bytes, size: int | None = None, channels: int = 3) -> np.ndarray:
    """Decode the content of a file to uint8 pixels (channels, height, width); raise an OSError if that is impossible.

    size: of the square that is cut out of the middle, as large as it fits, and resized; None: the picture as it is.
    channels: 1 for grey, 3 for RGB. Of an animation the first frame counts.
    """
    try:
        picture = open_picture(io.BytesIO(content), FORMATS, None if size is None else DRAFT * size)
    except UnidentifiedImageError as error:  # whose message would name the buffer, not the file
        raise OSError(f"it is none of {', '.join(FORMATS)}") from error
    picture = convert_mode(picture, channels)
    if size is not None:
        picture = crop_middle(picture, size, size, Image.Resampling.BILINEAR)
    pixels = np.array(picture)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def open_picture(
    source: Path | IO[bytes], formats: list[str] | tuple[str, ...], least: int | None = None
) -> Image.Image:
    """Decode a picture, turned as a viewer shows it; raise an OSError if it cannot be decoded.

    least: a JPEG may be shrunk while it is decoded, several times faster, as long as both sides keep so many pixels.
    """
    try:
        with Image.open(source, formats=formats) as opened:
            if least is not None:
                opened.draft(None, (least, least))
            opened.load()
            ImageOps.exif_transpose(opened, in_place=True)
            return opened
    except OSError:
        raise
    except Exception as error:  # Pillow's readers raise anything for damaged pictures
        raise OSError(f"it is damaged, or too large: {error or type(error).__name__}") from error


def convert_mode(picture: Image.Image, channels: int) -> Image.Image:
    """Convert a picture of any mode to grey (1 channel) or RGB (3), of eight bits; transparent parts become white."""
    if picture.mode == "RGB" and channels == 3 and not picture.has_transparency_data:
        return picture
    if picture.mode == "LAB":  # which Pillow converts to RGB only
        picture = picture.convert("RGB")
    picture = reduce_to_eight_bits(picture)
    if picture.has_transparency_data:
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    return picture.convert("L" if channels == 1 else "RGB")


def reduce_to_eight_bits(picture: Image.Image) -> Image.Image:
    """Reduce a picture of more bits to its upper eight; Pillow would clip at 255."""
    if picture.mode == "F":
        raise OSError("its pixels are floats of an unknown range")
    if not picture.mode.startswith("I"):
        return picture
    values = np.asarray(picture).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise OSError(f"its pixels go from {values.min()} to {values.max()}: they must have 8 or 16 bits")
    has_16_bits = picture.mode != "I" or values.max() > 255  # some readers return 16 bits as 32
    return Image.fromarray((values // 257 if has_16_bits else values).astype(np.uint8))


def crop_middle(picture: Image.Image, width: int, height: int, resampling: Image.Resampling) -> Image.Image:
    """Cut the largest part of this aspect ratio out of the middle and resize it; leave a picture of this size alone."""
    if picture.size == (width, height):
        return picture
    scale = min(picture.width / width, picture.height / height)
    left, top = (picture.width - scale * width) / 2, (picture.height - scale * height) / 2
    return picture.resize((width, height), resampling, box=(left, top, left + scale * width, top + scale * height))

"""Write archives in the format of Tiny ImageNet, with few and small images."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image


def tiny_imagenet(path: Path, classes: list[str], image: Callable[[int], Image.Image], words: str | None) -> None:
    """Two training images of each class and a test image, all JPEG, each made from a number of its own."""

    def jpeg(number: int) -> bytes:
        content = io.BytesIO()
        image(number).save(content, "JPEG", quality=95)
        return content.getvalue()

    root = "tiny-imagenet-200"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{root}/wnids.txt", "\n".join(classes) + "\n")
        if words is not None:
            archive.writestr(f"{root}/words.txt", words)
        rows = []
        for label, identifier in enumerate(classes):
            archive.writestr(f"{root}/train/{identifier}/{identifier}_boxes.txt", "not an image")
            for number in (1, 0):
                file = f"{root}/train/{identifier}/images/{identifier}_{number}.JPEG"
                archive.writestr(file, jpeg(10 * label + number))
            archive.writestr(f"{root}/val/images/val_{label}.JPEG", jpeg(100 + label))
            rows.append(f"val_{label}.JPEG\t{identifier}\t0\t0\t63\t63\n")
        archive.writestr(f"{root}/val/val_annotations.txt", "".join(reversed(rows)))
        archive.writestr(f"{root}/test/images/test_0.JPEG", jpeg(0))


def picture(number: int) -> Image.Image:
    """Slow gradients, which JPEG keeps; the odd ones are grey."""
    rows, columns = np.mgrid[:64, :64].astype(np.uint8)
    grey = Image.fromarray(rows * 2 + columns + np.uint8(number % 50))
    return grey if number % 2 else Image.merge("RGB", [grey, grey.transpose(Image.Transpose.ROTATE_90), grey])

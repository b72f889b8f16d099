"""Folders of pictures: coloured shapes, a folder for each class."""

from pathlib import Path

import numpy as np
from PIL import Image

SHAPES = ("bar", "disc", "square")


def draw_shape(label: int, generator: np.random.Generator, side: int = 24) -> np.ndarray:
    """Draw a picture (side, side, 3) of a class: a shape of random place and colour on a dark background."""
    down, right = (np.arange(side) - generator.uniform(0.4, 0.6, (2, 1)) * side) * 2 / side
    across, along = np.abs(right)[None, :], np.abs(down)[:, None]
    inside = [(across < 0.2) & (along < 0.9), across**2 + along**2 < 0.3, (across < 0.6) & (along < 0.6)][label]
    pixels = generator.integers(0, 60, (side, side, 3))
    pixels[inside] += generator.integers(60, 190, 3)
    return pixels.astype(np.uint8)


def write_shapes(folder: Path, count: int = 12, seed: int = 0, side: int = 24) -> Path:
    """Write `count` PNG files for each of three classes; return the folder."""
    generator = np.random.default_rng(seed)
    for label, name in enumerate(SHAPES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(draw_shape(label, generator, side)).save(folder / name / f"{number:03}.png")
    return folder

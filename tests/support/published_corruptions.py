"""The corruptions of CIFAR-10-C from their published formulas: one image at a time, in NumPy and SciPy.

A reference for `corrupt`, written independently of it from what make_cifar_c.py of Hendrycks and Dietterich computes,
and from what the functions of scikit-image, OpenCV, Pillow and ImageMagick that it calls compute. Images are uint8
(3, 32, 32). Whatever is drawn comes from a `Numbers`, so that a test can hand in the numbers that `corrupt` draws.
"""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from numpy import ndarray
from PIL import Image
from scipy import ndimage


class Numbers(Protocol):
    """Random numbers by the name of their purpose."""

    def uniform(self, stream: str, shape: tuple[int, ...], low: float, high: float) -> ndarray: ...
    def normal(self, stream: str, shape: tuple[int, ...]) -> ndarray: ...
    def integers(self, stream: str, shape: tuple[int, ...], low: int, high: int) -> ndarray: ...
    def poisson(self, stream: str, rates: ndarray) -> ndarray: ...


class Generated:
    """Numbers from NumPy's generator."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def uniform(self, stream: str, shape: tuple[int, ...], low: float, high: float) -> ndarray:
        return self.rng.uniform(low, high, shape)

    def normal(self, stream: str, shape: tuple[int, ...]) -> ndarray:
        return self.rng.normal(size=shape)

    def integers(self, stream: str, shape: tuple[int, ...], low: int, high: int) -> ndarray:
        return self.rng.integers(low, high, shape)

    def poisson(self, stream: str, rates: ndarray) -> ndarray:
        return self.rng.poisson(rates)


def published(image: ndarray, name: str, severity: int, numbers: Numbers) -> ndarray:
    """Corrupt an image; the last step of all is a cast to uint8, which cuts off."""
    pixels = FORMULAS[name](image / 255.0, severity - 1, numbers)
    return np.uint8(255 * np.clip(pixels, 0, 1) + 1e-6)


def rmse(images: ndarray, others: ndarray) -> float:
    """Root of the mean squared difference of pixels in [0,1], over all images and pixels."""
    return float(np.sqrt(np.mean((images / 255.0 - others / 255.0) ** 2)))


# Noise ---------------------------------------------------------------------------------------------------------------


def gaussian_noise(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    return x + (0.04, 0.06, 0.08, 0.09, 0.10)[level] * numbers.normal("noise", x.shape)


def shot_noise(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    photons = (500, 250, 100, 75, 50)[level]
    return numbers.poisson("noise", photons * x) / photons


def impulse_noise(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[level]
    chance = numbers.uniform("noise", x.shape, 0, 1)
    return np.where(chance < share / 2, 0.0, np.where(chance > 1 - share / 2, 1.0, x))


def speckle_noise(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    return x + x * (0.06, 0.10, 0.12, 0.16, 0.20)[level] * numbers.normal("noise", x.shape)


# Blurs ---------------------------------------------------------------------------------------------------------------


def smooth(x: ndarray, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> ndarray:
    """scikit-image's `gaussian` over the last two axes."""
    deviations = (*[0] * (x.ndim - 2), sigma, sigma)
    return ndimage.gaussian_filter(x, deviations, mode=mode, truncate=truncate)


def gaussian_blur(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    return smooth(x, (0.4, 0.6, 0.7, 0.8, 1.0)[level])


def glass_blur(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    """Neighbours are copied: the published swap assigns one view after the other, so the second changes nothing."""
    sigma, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[level]
    pixels = np.uint8(255 * smooth(x, sigma) + 1e-6)
    size = x.shape[-1]
    for turn in range(rounds):
        down, right = (numbers.integers(f"{axis} {turn}", ((size - 2) ** 2,), -1, 1) for axis in ("down", "right"))
        moves = iter(zip(down, right, strict=True))
        for row in range(size - 1, 1, -1):
            for column in range(size - 1, 1, -1):
                below, beside = next(moves)
                pixels[:, row, column] = pixels[:, row + below, column + beside]
    return smooth(pixels / 255.0, sigma)


def defocus_blur(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    radius, rim = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[level]
    line = np.arange(-8, 9)
    disc = (line[:, None] ** 2 + line**2 <= radius**2).astype(float)
    disc /= disc.sum()
    taps = np.exp(-np.array([1, 0, 1]) / (2 * rim**2))
    taps /= taps.sum()
    kernel = ndimage.convolve(disc, np.outer(taps, taps), mode="constant")
    return np.stack([ndimage.correlate(channel, kernel, mode="mirror") for channel in x])


def streak(x: ndarray, radius: float, sigma: float, degrees: float) -> ndarray:
    """ImageMagick's motion blur of (…, height, width), rounded to 8 bits."""
    weights = np.exp(-(np.arange(2 * math.ceil(radius) + 1) ** 2) / (2 * sigma**2))
    result = np.zeros_like(x)
    height, width = x.shape[-2:]
    for step, weight in enumerate(weights / weights.sum()):
        right = math.ceil(step * math.cos(math.radians(degrees)) - 0.5)
        down = math.ceil(step * math.sin(math.radians(degrees)) - 0.5)
        rows = np.clip(np.arange(height) + down, 0, height - 1)
        columns = np.clip(np.arange(width) + right, 0, width - 1)
        result += weight * x[..., rows[:, None], columns]
    return np.floor(255 * result + 0.5) / 255


def motion_blur(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[level]
    return streak(x, radius, sigma, float(numbers.uniform("direction", (), -45, 45)))


def clipped_zoom(x: ndarray, factor: float) -> ndarray:
    size = x.shape[-1]
    crop = math.ceil(size / factor)
    start = (size - crop) // 2
    inner = x[..., start : start + crop, start : start + crop]
    large = ndimage.zoom(inner, (*[1] * (x.ndim - 2), factor, factor), order=1)
    trim = (large.shape[-1] - size) // 2
    return large[..., trim : trim + size, trim : trim + size]


def zoom_blur(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[level], 0.01)
    return (x + sum(clipped_zoom(x, factor) for factor in factors)) / (len(factors) + 1)


# Weather -------------------------------------------------------------------------------------------------------------


def plasma(noise: ndarray, decay: float) -> ndarray:
    """Diamond-square on a torus; every displacement shrinks by decay² from grid to grid. noise: (side, side)."""
    side = len(noise)
    field, step, strength = np.zeros((side, side)), side, 1.0

    def fill(row: int, column: int, offsets: list[tuple[int, int]]) -> None:
        around = [field[(row + down) % side, (column + right) % side] for down, right in offsets]
        field[row, column] = np.mean(around) + strength * noise[row, column]

    while step >= 2:
        half = step // 2
        for row in range(half, side, step):
            for column in range(half, side, step):
                fill(row, column, [(-half, -half), (-half, half), (half, -half), (half, half)])
        for row in range(0, side, half):
            for column in range((row + half) % step, side, step):
                fill(row, column, [(-half, 0), (half, 0), (0, -half), (0, half)])
        step, strength = half, strength / decay**2
    return (field - field.min()) / (field.max() - field.min())


def fog(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    thickness, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[level]
    cloud = plasma(numbers.uniform("fog", x.shape[1:], -1, 1), decay)
    return (x + thickness * cloud) * x.max() / (x.max() + thickness)


def snow(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    mean, deviation, factor, floor, radius, sigma, clear = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[level]
    layer = clipped_zoom(mean + deviation * numbers.normal("flakes", x.shape[1:]), factor)
    layer[layer < floor] = 0
    layer = np.floor(255 * np.clip(layer, 0, 1)) / 255
    layer = streak(layer, radius, sigma, float(numbers.uniform("fall", (), -135, -45)))
    grey = 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]
    return clear * x + (1 - clear) * np.maximum(x, 1.5 * grey + 0.5) + layer + layer[::-1, ::-1]


def frost(pictures: list[ndarray]) -> Callable[[ndarray, int, Numbers], ndarray]:
    """With the published photographs, uint8 (height, width, 3), of which it uses the first five."""
    # Shrunk to a fifth without smoothing: linear interpolation at the middle of five pixels is the middle one.
    panes = [own[2::5, 2::5][: round(0.2 * len(own)), : round(0.2 * own.shape[1])] / 255.0 for own in pictures[:5]]

    def with_pictures(x: ndarray, level: int, numbers: Numbers) -> ndarray:
        keep, add = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[level]
        pane = panes[int(numbers.integers("pane", (), 0, 5))]
        top = int(numbers.integers("top", (), 0, pane.shape[0] - x.shape[1]))
        left = int(numbers.integers("left", (), 0, pane.shape[1] - x.shape[2]))
        return keep * x + add * pane[top : top + x.shape[1], left : left + x.shape[2]].transpose(2, 0, 1)

    return with_pictures


def read_pictures(folder: Path) -> list[ndarray]:
    """frost1 to frost6 from the generator's folder."""
    files = sorted(file for file in folder.iterdir() if file.stem.startswith("frost") and file.stem[5:].isdigit())
    return [np.asarray(Image.open(file).convert("RGB")) for file in files]


def brightness(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    hsv = rgb_to_hsv(x.transpose(1, 2, 0))
    hsv[..., 2] = np.clip(hsv[..., 2] + (0.05, 0.1, 0.15, 0.2, 0.3)[level], 0, 1)
    return hsv_to_rgb(hsv).transpose(2, 0, 1)


# Spatter -------------------------------------------------------------------------------------------------------------


def canny(grey: ndarray, low: float, high: float) -> ndarray:
    """OpenCV's edges of an 8-bit image, by its rules for one pixel after the other."""
    padded = np.pad(grey.astype(int), 1, mode="edge")
    height, width = grey.shape
    right, down = np.zeros((height, width), int), np.zeros((height, width), int)
    for row in range(height):
        for column in range(width):
            around = padded[row : row + 3, column : column + 3]
            right[row, column] = around[:, 2] @ (1, 2, 1) - around[:, 0] @ (1, 2, 1)
            down[row, column] = around[2] @ (1, 2, 1) - around[0] @ (1, 2, 1)
    strength = np.pad(abs(right) + abs(down), 1)
    candidates = np.zeros((height, width), bool)
    for row in range(height):
        for column in range(width):
            own, x, y = strength[row + 1, column + 1], right[row, column], down[row, column]
            if own <= low:
                continue
            if abs(y) * 2**15 < abs(x) * 13573:
                one, other, strict = strength[row + 1, column], strength[row + 1, column + 2], False
            elif abs(y) * 2**15 > abs(x) * (13573 + 2**16):
                one, other, strict = strength[row, column + 1], strength[row + 2, column + 1], False
            else:
                side = -1 if (x < 0) != (y < 0) else 1
                one, other, strict = strength[row, column + 1 - side], strength[row + 2, column + 1 + side], True
            candidates[row, column] = own > one and (own > other if strict else own >= other)
    lines, _ = ndimage.label(candidates, np.ones((3, 3)))
    strong = set(lines[candidates & (strength[1:-1, 1:-1] > high)])
    return np.isin(lines, list(strong)) & candidates


def chamfer(edges: ndarray) -> ndarray:
    """OpenCV's L2 distance with a 5×5 mask: a sweep forwards, a sweep backwards."""
    mask = [(-2, -1, 2.1969), (-2, 1, 2.1969), (-1, -2, 2.1969), (-1, -1, 1.4), (-1, 0, 1), (-1, 1, 1.4)]
    mask += [(-1, 2, 2.1969), (0, -1, 1)]
    height, width = edges.shape
    field = np.full((height + 4, width + 4), 8192.0)
    field[2:-2, 2:-2][edges] = 0
    for sign in (1, -1):
        for row in range(2, height + 2)[::sign]:
            for column in range(2, width + 2)[::sign]:
                nearer = min(field[row + sign * down, column + sign * right] + length for down, right, length in mask)
                field[row, column] = min(field[row, column], nearer)
    return field[2:-2, 2:-2]


def equalize(grey: ndarray) -> ndarray:
    counts = np.bincount(grey.ravel(), minlength=256)
    first = int(grey.min())
    if counts[first] == grey.size:
        return grey
    scale = np.float32(255) / np.float32(grey.size - counts[first])
    table = [np.round(np.float32(counts[first + 1 : level + 1].sum()) * scale) for level in range(256)]
    return np.uint8(table)[grey]


def box(x: ndarray) -> ndarray:
    return ndimage.correlate(x.astype(np.float32), np.full((3, 3), np.float32(1 / 9)), mode="mirror")


def spatter(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    mean, deviation, sigma, floor, strength = (
        (0.62, 0.1, 0.7, 0.7, 0.5),
        (0.65, 0.1, 0.8, 0.7, 0.5),
        (0.65, 0.3, 1, 0.69, 0.5),
        (0.65, 0.1, 0.7, 0.69, 0.6),
        (0.65, 0.1, 0.5, 0.68, 0.6),
    )[level]
    liquid = smooth(mean + deviation * numbers.normal("drops", x.shape[1:]), sigma)
    liquid[liquid < floor] = 0
    if level >= 3:
        mud = smooth((liquid > floor).astype(float), strength)
        mud[mud < 0.8] = 0
        return x * (1 - mud) + mud * np.array([63, 42, 20])[:, None, None] / 255
    liquid = np.uint8(np.clip(255 * liquid, 0, 255))
    depth = np.uint8(box(np.minimum(chamfer(canny(liquid, 50, 150)), 20)) + 1e-5)
    relief = ndimage.correlate(
        equalize(depth).astype(int), np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]), mode="mirror"
    )
    water = liquid * np.round(box(np.clip(relief, 0, 255)))
    if water.max() > 0:
        water = water / water.max()
    return x + strength * water * np.array([175, 238, 238])[:, None, None] / 255


# Processing ----------------------------------------------------------------------------------------------------------


def contrast(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    means = x.mean((1, 2), keepdims=True)
    return means + (0.75, 0.5, 0.4, 0.3, 0.15)[level] * (x - means)


def saturate(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    factor, added = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[level]
    hsv = rgb_to_hsv(x.transpose(1, 2, 0))
    hsv[..., 1] = np.clip(factor * hsv[..., 1] + added, 0, 1)
    return hsv_to_rgb(hsv).transpose(2, 0, 1)


def elastic_transform(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    """OpenCV rounds the places of the affine map to 1/32 of a pixel, which is left out here."""
    size = x.shape[-1]
    amplitude, sigma, jitter = (
        np.array([(0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)])[level]
        * size
    )
    middle, reach = size // 2, size // 3
    corners = middle + reach * np.array([[1, 1], [1, -1], [-1, -1]])  # x, y
    moved = corners + numbers.uniform("corners", (3, 2), -jitter, jitter)
    ones = np.ones((3, 1))
    back = np.linalg.solve(np.hstack((moved, ones)), corners)  # from where a pixel is to where it comes from
    rows, columns = np.mgrid[:size, :size].astype(float)
    source = np.stack((columns, rows, np.ones_like(rows)), -1) @ back
    warped = [ndimage.map_coordinates(own, (source[..., 1], source[..., 0]), order=1, mode="mirror") for own in x]
    bumps = numbers.uniform("bumps", (2, size, size), -1, 1)
    right, down = amplitude * smooth(bumps, sigma, mode="reflect", truncate=3.0)
    return np.stack(
        [ndimage.map_coordinates(own, (rows + down, columns + right), order=1, mode="reflect") for own in warped]
    )


def picture(x: ndarray) -> Image.Image:
    return Image.fromarray(np.uint8(np.round(255 * x)).transpose(1, 2, 0))


def pixelate(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    size = x.shape[-1]
    small = int(size * (0.95, 0.9, 0.85, 0.75, 0.65)[level])
    boxes = picture(x).resize((small, small), Image.Resampling.BOX).resize((size, size), Image.Resampling.BOX)
    return np.asarray(boxes).transpose(2, 0, 1) / 255.0


def jpeg_compression(x: ndarray, level: int, numbers: Numbers) -> ndarray:
    stream = io.BytesIO()
    picture(x).save(stream, "JPEG", quality=(80, 65, 58, 50, 40)[level])
    return np.asarray(Image.open(stream)).transpose(2, 0, 1) / 255.0


FORMULAS: dict[str, Callable[[ndarray, int, Numbers], ndarray]] = {  # frost needs photographs: see `frost`
    own.__name__: own
    for own in (
        *(gaussian_noise, shot_noise, impulse_noise, speckle_noise),
        *(gaussian_blur, defocus_blur, glass_blur, motion_blur, zoom_blur),
        *(snow, fog, brightness, spatter),
        *(contrast, saturate, elastic_transform, pixelate, jpeg_compression),
    )
}

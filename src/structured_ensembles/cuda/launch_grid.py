"""Launch-grid arithmetic of our Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass

SWEEPS, LEAST_STRIP = 800, 6  # strips of all members that keep a GPU busy; the least rows of a strip


def ceil_div(number: int, by: int) -> int:
    """Divide, rounding up."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def dot_size(number: int) -> int:
    """Return the smallest power of two that is at least `number`, and large enough for a matrix product."""
    return max(16, power_of_two(number))


def channel_units(channels: int) -> tuple[int, int]:
    """Return (number of units, channels per unit): 8 channels, which are loaded at a time, or 1."""
    unit = 1 if channels % 8 else 8
    return channels // unit, unit


def moment_blocks(channels: int) -> int:
    """Return the largest number of blocks of rows that statistics are cut into, so that merging them stays cheap."""
    return 256 if channels <= 16 else 128


@dataclass(frozen=True)
class Sweep:
    """A division of images into strips of rows, each of which one program goes down."""

    images: int  # side by side in a strip
    strip: int  # rows of a strip
    strips: int  # of an image
    pixels: int  # of a row of a tile, a power of two

    @classmethod
    def of(cls, images: int, rows: int, width: int, members: int, pixels: int) -> Sweep:
        """Divide the images of each member. rows, width: of an image. pixels: that a row of a tile should have."""
        beside = max(min(pixels // width, images), 1)
        groups = ceil_div(images, beside)
        # Strips read two more rows than they have: as few as keep the GPU busy.
        strips = min(max(ceil_div(SWEEPS, groups * members), 1), ceil_div(rows, LEAST_STRIP))
        strip = ceil_div(rows, strips)
        return cls(beside, strip, ceil_div(rows, strip), dot_size(beside * width))

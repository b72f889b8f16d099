"""Launch-grid arithmetic of our Triton kernels."""


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

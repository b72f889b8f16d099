"""How our kernels are told of sizes."""


def divided(number: int, by: int) -> int:
    """Rounded up."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


def in_units(channels: int) -> tuple[int, int]:
    """How many units, and of how many channels: 8, which can be read at a time, or 1."""
    unit = 1 if channels % 8 else 8
    return channels // unit, unit

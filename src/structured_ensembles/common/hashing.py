"""Hash numbers by integer arithmetic, the same on every device."""

from torch import Tensor


def mix_bits(x: Tensor) -> Tensor:
    """Hash int32 numbers so that every bit depends on every bit (lowbias32, by Chris Wellons).

    Integers wrap around on every device, so that all devices agree.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        shifted = x >> shift  # the only new memory, which costs more than the arithmetic
        shifted &= 2 ** (32 - shift) - 1
        shifted ^= x
        shifted *= as_int32(factor)
        x = shifted
    return x


def as_int32(number: int) -> int:
    """Wrap the number modulo 2^32 to between -2^31 and 2^31."""
    return (number + 2**31) % 2**32 - 2**31

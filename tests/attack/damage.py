"""Damage to the bytes of a file, as disks, transfers and careless tools do it; whatever checksums there are stay."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

Damage = Callable[[Random, bytes], bytes]


def flip_bit(random: Random, data: bytes) -> bytes:
    return _with_byte(data, place := random.randrange(len(data)), data[place] ^ (1 << random.randrange(8)))


def replace_byte(random: Random, data: bytes) -> bytes:
    return _with_byte(data, random.randrange(len(data)), random.randrange(256))


def flip_many(random: Random, data: bytes) -> bytes:
    for _ in range(random.randrange(2, 50)):
        data = flip_bit(random, data)
    return data


def flip_bit_at_start(random: Random, data: bytes) -> bytes:
    """In the first 100 bytes, where formats say what they are and how long."""
    return flip_bit(random, data[:100]) + data[100:]


def truncate(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data))]


def cut_start(random: Random, data: bytes) -> bytes:
    return data[random.randrange(1, len(data) + 1) :]


def append(random: Random, data: bytes) -> bytes:
    return data + random.choice([random.randbytes(random.randrange(1, 100)), b"\0", b"\n\n", b"}", data])


def zero_block(random: Random, data: bytes) -> bytes:
    start, stop = _block(random, data)
    return data[:start] + bytes(stop - start) + data[stop:]


def drop_block(random: Random, data: bytes) -> bytes:
    start, stop = _block(random, data)
    return data[:start] + data[stop:]


def repeat_block(random: Random, data: bytes) -> bytes:
    start, stop = _block(random, data)
    return data[:stop] + data[start:]


def swap_blocks(random: Random, data: bytes) -> bytes:
    a, b, c = sorted(random.randrange(len(data) + 1) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def noise(random: Random, data: bytes) -> bytes:
    return random.choice([b"", b"\0" * len(data), random.randbytes(len(data)), b"\xff" * 8, b"<html>not found</html>"])


def forge_length(random: Random, data: bytes) -> bytes:
    """The first eight bytes of a safetensors file are the length of its header."""
    length = random.choice(
        [0, 1, 2**16, 100_000_000, 2**31, 2**40, 2**63, 2**64 - 1, len(data), random.getrandbits(64)]
    )
    return struct.pack("<Q", length) + data[8:]


def _with_byte(data: bytes, place: int, value: int) -> bytes:
    return data[:place] + bytes([value]) + data[place + 1 :]


def _block(random: Random, data: bytes) -> tuple[int, int]:
    start = random.randrange(len(data))
    return start, min(len(data), start + random.choice([1, 4, 64, 512, 4096]))


DAMAGES: dict[str, Damage] = {
    "flip-bit": flip_bit,
    "flip-bit-at-start": flip_bit_at_start,
    "replace-byte": replace_byte,
    "flip-many": flip_many,
    "truncate": truncate,
    "cut-start": cut_start,
    "append": append,
    "zero-block": zero_block,
    "drop-block": drop_block,
    "repeat-block": repeat_block,
    "swap-blocks": swap_blocks,
    "noise": noise,
}

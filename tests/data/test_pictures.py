"""Pictures of every usual mode, size and orientation become pixels of one shape; damaged ones become an OSError."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from structured_ensembles.data.pictures import decode_picture

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def content_of(picture: Image.Image, name: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, name, **options)
    return buffer.getvalue()


def one_colour(colour: Any, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (4, 4), colour)


@pytest.mark.parametrize("name", ["PNG", "BMP", "TIFF"])
def test_pixels_are_those_of_the_file(name: str) -> None:
    pixels = decode_picture(content_of(Image.fromarray(RGB), name))
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, RGB.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (content_of(one_colour(80, "L")), (80, 80, 80)),
        (content_of(one_colour(1, "1")), (255, 255, 255)),
        (content_of(one_colour((200, 100, 50)).quantize(4)), (200, 100, 50)),
        (content_of(one_colour((80, 255), "LA")), (80, 80, 80)),
        (content_of(one_colour((9, 9, 9, 0), "RGBA")), (255, 255, 255)),  # transparent: white, whatever lies below
        (content_of(one_colour((0, 0, 200, 255), "RGBA")), (0, 0, 200)),
        (content_of(Image.fromarray(np.full((4, 4), 200 * 257, np.uint16))), (200, 200, 200)),
        (content_of(one_colour((0, 0, 0, 0), "CMYK"), "JPEG"), (255, 255, 255)),
        (content_of(one_colour((0, 0, 0, 255), "CMYK"), "TIFF"), (0, 0, 0)),
        (content_of(one_colour((10, 200, 30)), "WEBP", lossless=True), (10, 200, 30)),
        (content_of(one_colour(7, "L"), "GIF", save_all=True, append_images=[one_colour(90, "L")]), (7, 7, 7)),
    ],
)
def test_every_mode_becomes_rgb(content: bytes, expected: tuple[int, int, int]) -> None:
    pixels = decode_picture(content)
    assert pixels.shape == (3, 4, 4)
    assert np.array_equal(pixels, np.broadcast_to(np.array(expected)[:, None, None], (3, 4, 4)))


def test_one_channel_is_grey() -> None:
    pixels = decode_picture(content_of(one_colour((255, 0, 0))), channels=1)
    assert pixels.shape == (1, 4, 4)
    assert np.all(pixels == 76)  # 0.299 of red, by ITU-R 601
    assert np.all(decode_picture(content_of(one_colour((255, 128, 128), "LAB"), "TIFF"), channels=1) >= 254)  # white


def test_orientation_is_that_of_a_viewer() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90° clockwise
    pixels = decode_picture(content_of(Image.fromarray(RGB), exif=exif))
    assert np.array_equal(pixels, np.rot90(RGB, -1).transpose(2, 0, 1))


@pytest.mark.parametrize("turned", [False, True])
def test_the_middle_is_cut_out_and_resized(turned: bool) -> None:
    """A picture of three squares: its middle one is what is left, at a quarter of its size."""
    squares = np.zeros((40, 120, 3), np.uint8)
    squares[:, :40, 0], squares[:, 40:80, 1], squares[:, 80:, 2] = 255, 200, 255
    squares = squares.transpose(1, 0, 2) if turned else squares
    pixels = decode_picture(content_of(Image.fromarray(squares)), size=10)
    assert pixels.shape == (3, 10, 10)
    inner = pixels[:, 1:-1, 1:-1]  # without the border, where the neighbours' colours are mixed in
    assert np.array_equal(inner, np.broadcast_to(np.array([0, 200, 0])[:, None, None], inner.shape))


def test_small_pictures_are_enlarged_and_those_of_the_size_stay() -> None:
    assert decode_picture(content_of(one_colour((1, 2, 3))), size=9)[:, 4, 4].tolist() == [1, 2, 3]
    square = RGB[:, :6]
    assert np.array_equal(decode_picture(content_of(Image.fromarray(square)), size=6), square.transpose(2, 0, 1))


def test_large_jpegs_shrink_while_they_are_decoded_and_look_the_same() -> None:
    smooth = Image.fromarray(RGB).resize((400, 300), Image.Resampling.BICUBIC)
    content = content_of(smooth, "JPEG", quality=95)
    with Image.open(io.BytesIO(content)) as whole:
        expected = whole.resize((32, 32), Image.Resampling.BILINEAR, box=(50, 0, 350, 300))
    difference = decode_picture(content, size=32).astype(float) - np.asarray(expected).transpose(2, 0, 1)
    assert np.abs(difference).mean() < 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "none of PNG"),
        (b"<svg></svg>", "none of PNG"),
        (content_of(Image.fromarray(RGB))[:60], "truncated|damaged"),
        (content_of(Image.fromarray(RGB), "PPM"), "none of PNG"),
        (content_of(Image.fromarray(RGB[..., 0].astype(np.float32)), "TIFF"), "floats"),
    ],
)
def test_what_is_no_picture_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(OSError, match=reason):
        decode_picture(content)

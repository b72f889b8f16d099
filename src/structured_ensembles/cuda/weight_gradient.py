"""Gradients of the weights of stacked convolutions: one launch for all members, and one that adds up its partial sums.

A member's pixels are divided among the programs of the first kernel, as blocks. Each writes the gradient of all weights
as far as its block goes, (members, blocks, weights); the second kernel adds up the blocks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structured_ensembles.cuda import tiles
from structured_ensembles.cuda.convolution import Window, shared_memory_of
from structured_ensembles.cuda.launch import empty, launch
from structured_ensembles.cuda.launch_grid import Sweep, ceil_div, channel_units, power_of_two
from structured_ensembles.cuda.tiles import ProductTile

MAX_BLOCKS = 256  # of a member's pixels
MERGED_BLOCKS, MERGE_TILE = 64, 1024  # blocks, and numbers in all, that are merged at a time


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Return the gradient of the weights, (members, outputs, inputs, rows, taps), in float32.

    x: (members × images, inputs, height, width). dy: the gradient of the outputs. weight: only its shape matters.
    """
    _, outputs, inputs, rows, taps = weight.shape
    if not tiles.has_narrow_products(inputs, outputs, rows, taps):
        partial = _products_by_taps(x, dy, weight, window)
    elif rows == taps == 3 and window.stride == 1 and dy.shape[3] <= tiles.WIDEST_IMAGE:
        partial = _products_by_sweep(x, dy, weight, window)
    else:
        partial = _products_by_rows(x, dy, weight, window)
    return _merge_blocks(partial, weight)


def _products_by_sweep(x: Tensor, dy: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Launch the kernel for narrow layers with a window of 3 × 3 and stride 1."""
    from structured_ensembles.cuda.kernels.weight_gradient import weight_products_by_sweep

    members, outputs, inputs, rows, taps = weight.shape
    input_units, output_units, units = _units(inputs, outputs)
    (height, width), (out_height, out_width) = x.shape[2:], dy.shape[2:]
    images = len(x) // members
    tile = tiles.products_by_sweep(taps * inputs, outputs, out_width, shared_memory_of(x.device))
    sweep = Sweep.of(images, height, out_width, members, tile.pixels)
    blocks = ceil_div(images, sweep.images) * sweep.strips
    partial = empty(members, blocks, outputs * rows * taps * inputs, like=x)
    launch(
        weight_products_by_sweep, (blocks, members),
        x, dy, partial, images, height, out_height, window.padding, input_units, output_units,
        sweep.strips, sweep.strip, WIDTH=width, OUT_WIDTH=out_width, **units, IMAGES=sweep.images,
        HIGH=tile.inputs, WIDE=tile.outputs, DEEP=sweep.pixels, STAGES=tile.stages, **tile.options,
    )  # fmt: skip
    return partial


def _products_by_rows(x: Tensor, dy: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Launch the kernel for narrow layers, which computes a row of the window at a time."""
    from structured_ensembles.cuda.kernels.weight_gradient import weight_products_by_rows

    _, outputs, inputs, _, taps = weight.shape
    tile = tiles.products_by_rows(taps * inputs, outputs)
    return _launch_by_pixels(
        weight_products_by_rows, x, dy, weight, window, tile, weight_tiles=ceil_div(outputs, tile.outputs)
    )


def _products_by_taps(x: Tensor, dy: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Launch the kernel for wide layers, whose programs have up to three taps of the window each."""
    from structured_ensembles.cuda.kernels.weight_gradient import weight_products_by_taps

    _, outputs, inputs, rows, taps = weight.shape
    tile = tiles.products_by_taps(inputs, outputs, shared_memory_of(x.device))
    input_tiles = ceil_div(inputs, tile.inputs)
    weight_tiles = rows * ceil_div(taps, 3) * input_tiles * ceil_div(outputs, tile.outputs)
    is_whole = inputs % tile.inputs == 0 and outputs % tile.outputs == 0
    return _launch_by_pixels(
        weight_products_by_taps, x, dy, weight, window, tile, input_tiles, weight_tiles=weight_tiles, WHOLE=is_whole
    )


def _launch_by_pixels(
    kernel: Any,
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    window: Window,
    tile: ProductTile,
    *sizes: int,
    weight_tiles: int,
    **constants: bool,
) -> Tensor:
    """Launch a kernel whose programs have blocks of a member's pixels, in tiles; returns its partial sums.

    weight_tiles: of a member's weights. sizes, constants: that only this kernel has.
    """
    members, outputs, inputs, rows, taps = weight.shape
    input_units, output_units, units = _units(inputs, outputs)
    out_height, out_width = dy.shape[2:]
    pixels = len(x) // members * out_height * out_width
    wanted = max(tile.programs // (members * weight_tiles), 1)
    blocks, count = tiles.divide(pixels, tile.pixels, min(wanted, max(pixels // (4 * tile.pixels), 1), MAX_BLOCKS))
    partial = empty(members, blocks, outputs * rows * taps * inputs, like=x)
    launch(
        kernel, (blocks, members, weight_tiles),
        x, dy, partial, pixels, *x.shape[2:], window.padding, input_units, output_units, count, *sizes,
        STRIDE=window.stride, OUT_WIDTH=out_width, OUT_PIXELS=out_height * out_width, ROWS=rows, TAPS=taps, **units,
        **constants, HIGH=tile.inputs, WIDE=tile.outputs, DEEP=tile.pixels, **tile.options,
    )  # fmt: skip
    return partial


def _merge_blocks(partial: Tensor, weight: Tensor) -> Tensor:
    """Add up partial sums (members, blocks, weights) over the blocks; the result has the shape of `weight`."""
    from structured_ensembles.cuda.kernels.weight_gradient import merge_blocks

    members, outputs, inputs, rows, taps = weight.shape
    _, blocks, size = partial.shape
    if blocks == 1:
        return partial.view(members, outputs, rows, taps, inputs).permute(0, 1, 4, 2, 3)
    result = empty(members, outputs, rows, taps, inputs, like=partial)
    tall = min(MERGED_BLOCKS, power_of_two(blocks))
    across = max(MERGE_TILE // tall, 1)
    units, unit = channel_units(size)
    grid = (ceil_div(size, across), members)
    launch(merge_blocks, grid, partial, result, units, blocks, UNIT=unit, HIGH=tall, WIDE=across)
    return result.permute(0, 1, 4, 2, 3)


def _units(inputs: int, outputs: int) -> tuple[int, int, dict[str, Any]]:
    """Return the numbers of units of inputs and outputs, and the kernels' constants that say how large a unit is."""
    input_units, input_unit = channel_units(inputs)
    output_units, output_unit = channel_units(outputs)
    return input_units, output_units, {"INPUT_UNIT": input_unit, "OUTPUT_UNIT": output_unit}

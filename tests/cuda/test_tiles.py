"""Tiles of the convolution kernels: every pixel belongs to one tile, GPUs are kept busy, statistics stay few."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from structured_ensembles.cuda import tiles
from structured_ensembles.cuda.launch_grid import dot_size, moment_blocks
from structured_ensembles.cuda.tiles import LayerSize, Tile


def sizes(max_channels: int) -> st.SearchStrategy[LayerSize]:
    return st.builds(
        LayerSize,
        members=st.integers(1, 20),
        pixels=st.integers(1, 300_000),
        width=st.sampled_from([1, 2, 7, 16, 32, 64, 128, 224]),
        inputs=st.integers(1, max_channels),
        outputs=st.integers(1, max_channels),
        backward=st.booleans(),
        statistics=st.booleans(),
        float32=st.booleans(),
    )


SIZES = sizes(max_channels=700)


@given(pixels=st.integers(1, 300_000), tile=st.sampled_from([32, 64, 128, 256]), limit=st.none() | st.integers(1, 512))
def test_blocks_cover_all_pixels_and_none_is_empty(pixels: int, tile: int, limit: int | None) -> None:
    blocks, count = tiles.divide(pixels, tile, limit)
    assert (blocks - 1) * count * tile < pixels <= blocks * count * tile
    assert limit is None or blocks <= limit


@given(SIZES)
def test_only_statistics_limit_the_number_of_blocks(size: LayerSize) -> None:
    assert replace(size, statistics=False).blocks(64)[1] == 1
    assert replace(size, statistics=True).blocks(64)[0] <= moment_blocks(size.outputs)


@given(SIZES | sizes(max_channels=64))
def test_tiles_are_powers_of_two_and_no_larger_than_the_layer_needs(size: LayerSize) -> None:
    chosen = [tiles.tap_tile(size), tiles.back_tile(size, size.pixels)]
    assert all(tile.outputs <= dot_size(size.outputs) for tile in chosen)
    assert all(tile.inputs <= dot_size(size.inputs) for tile in chosen)
    if 3 * size.inputs <= tiles.WIDEST_ROW and size.outputs <= 64:
        chosen.append(tiles.row_tile(size, 3))
        assert chosen[-1].inputs >= 3 * size.inputs
    if tiles.can_be_swept(size):
        columns = dot_size(3 * size.inputs)
        chosen.append(tiles.sweep_tile(size, columns))
        assert 3 * size.inputs <= columns <= 256
        assert size.outputs <= 64
    for tile in chosen:
        for number in (tile.pixels, tile.inputs, tile.warps):
            assert number & (number - 1) == 0
        assert tile.pixels * tile.outputs <= 128 * tile.warps * 32  # accumulators of a thread: at most 128 registers


GPUS = st.sampled_from([64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])  # shared memory: AMD's, RTX 4090, A100, H100


@given(SIZES, GPUS)
def test_shared_memory_holds_all_stages_of_a_tile_by_taps(size: LayerSize, shared_memory: int) -> None:
    """A pipeline has two stages at least, and a matrix product 16 pixels."""
    size = replace(size, shared_memory=shared_memory)
    for tile in (tiles.tap_tile(size), tiles.back_tile(size, size.pixels)):
        of_a_stage = (tile.pixels + tile.outputs) * tile.inputs * (4 if size.float32 else 2)
        assert of_a_stage * tile.stages <= shared_memory
        assert tile.stages >= 2
        assert tile.pixels >= 16
    products = tiles.products_by_taps(size.inputs, size.outputs, shared_memory)
    of_a_stage = (3 * products.inputs + products.outputs) * products.pixels * 2
    assert of_a_stage * products.stages <= shared_memory
    assert products.stages >= 2


def sweep_bytes(tile: Tile, width: int, element_size: int, reads: tuple[int, int]) -> int:
    """Return the bytes of all stages of a sweep, which reads so many rows of inputs and of outputs at a time."""
    pixels = max(tile.pixels, dot_size(width))
    return tile.stages * pixels * (reads[0] * tile.inputs + reads[1] * tile.outputs) * element_size


@example(LayerSize(1, 131072, 128, 20, 32, float32=True), 99 * 1024)  # which wanted 124 KB
@given(sizes(max_channels=64), GPUS)
def test_sweeps_have_fewer_stages_where_a_gpu_has_less_shared_memory(size: LayerSize, shared_memory: int) -> None:
    """Two stages at least; all that were measured on an H200."""
    if tiles.can_be_swept(size):
        columns = dot_size(3 * size.inputs)
        tile = tiles.sweep_tile(replace(size, shared_memory=shared_memory), columns)
        fits = sweep_bytes(tile, size.width, size.element_size, (1, 1)) <= shared_memory
        assert fits or tile.stages == 2
        assert tile == replace(tiles.sweep_tile(size, columns), stages=tile.stages)
        assert tiles.sweep_tile(size, columns).stages == 3
    if tiles.has_narrow_products(size.inputs, size.outputs, 3, 3) and size.width <= tiles.WIDEST_IMAGE:
        arguments = 3 * size.inputs, size.outputs, size.width
        products = tiles.products_by_sweep(*arguments, shared_memory)
        assert sweep_bytes(products, size.width, 2, (1, 3)) <= shared_memory or products.stages == 2
        assert tiles.products_by_sweep(*arguments).stages == 3


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        # As measured on an H200: few programs get small tiles, many pixels large ones.
        (LayerSize(1, 131072, 32, 64, 64, statistics=True), Tile(256, 64, 64, warps=8)),
        (LayerSize(4, 32768, 16, 64, 64, statistics=True), Tile(128, 64, 64)),
        (LayerSize(1, 32768, 16, 128, 128, statistics=True), Tile(256, 128, 64, warps=8)),
        (LayerSize(1, 8192, 8, 256, 256, statistics=True), Tile(128, 64, 64)),
        (LayerSize(1, 8192, 8, 256, 256, backward=True, statistics=True), Tile(64, 128, 64)),
        (LayerSize(1, 2048, 4, 512, 512, statistics=True), Tile(64, 64, 128)),
        (LayerSize(5, 8192, 8, 128, 128, statistics=True), Tile(128, 64, 64)),
    ],
)
def test_tiles_of_the_layers_that_were_measured(size: LayerSize, expected: Tile) -> None:
    assert tiles.tap_tile(size) == expected


def test_options_limit_registers_only_where_a_tile_does() -> None:
    assert Tile(64, 64, 64).options == {"num_warps": 4, "num_stages": 3}
    assert Tile(64, 64, 64, registers=128).options["maxnreg"] == 128

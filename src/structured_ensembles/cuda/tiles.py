"""How large the tiles of the convolution kernels are, by the size of the layer.

`benchmarks/tiles.py` has measured many tiles on an H200, layer by layer; these functions return the fastest. Large ones
read less; small ones make more programs, which a GPU needs to be busy. Where few registers are allowed, more programs
run at a time. GPUs with less shared memory get the same tiles with fewer stages (`fit`), which nobody has measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from structured_ensembles.cuda.launch_grid import ceil_div, dot_size, moment_blocks

MULTIPROCESSORS = 132  # of an H100 or H200: tiles are as large as keeps them all busy
MANY_PIXELS = 2**16  # of one member, from which on its tiles may be larger
WIDEST_ROW = 64  # columns (taps × inputs) up to which layers are computed by rows
WIDEST_SWEEP, WIDEST_SWEEP_BACK = 128, 192  # columns up to which layers are computed by sweeps; back, to few outputs
WIDEST_SWEEP_FLOAT32 = 64
WIDEST_PRODUCTS = 128, 32  # columns and outputs up to which gradients of weights are computed by sweeps and by rows
WIDEST_IMAGE = 128  # pixels of a row that a sweep for gradients of weights holds
# A GPU runs programs in waves, here of one for each multiprocessor. The largest tiles are taken where their programs
# fill this part of the waves that they need; the next smaller ones where their programs are enough for so many waves.
FULL_WAVE, FEWEST_WAVES = 0.9, 1.5
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on an H100; other GPUs have less


@dataclass(frozen=True)
class Tile:
    """A tile of pixels × outputs, computed from so many inputs at a time (by rows and by sweeps: columns).

    warps, stages: of a program and of its pipeline. registers: of a thread at most.
    """

    pixels: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 3
    registers: int | None = None

    def bytes_of_stage(self, element_size: int) -> int:
        """Return the shared memory of one stage of the pipeline of a kernel by taps."""
        return (self.pixels + self.outputs) * self.inputs * element_size

    @property
    def options(self) -> dict[str, int]:
        """Return the options of a launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclass(frozen=True)
class ProductTile(Tile):
    """A tile of inputs (or columns, taps × inputs) × outputs of a gradient of weights, from so many pixels at a time.

    programs: of a launch at most: as many as keep a GPU busy, and few sums to merge.
    """

    programs: int = 1200

    def bytes_of_stage(self, element_size: int) -> int:
        """Return the shared memory of one stage of the pipeline of a kernel by taps, which reads three."""
        return (3 * self.inputs + self.outputs) * self.pixels * element_size


class SweptProductTile(ProductTile):
    """A tile of a sweep: it reads a row of the inputs, and three of the gradients of the outputs."""

    def bytes_of_stage(self, element_size: int) -> int:
        """Return the shared memory of one stage of the pipeline of a sweep."""
        return (self.inputs + 3 * self.outputs) * self.pixels * element_size


AnyTile = TypeVar("AnyTile", bound=Tile)


@dataclass(frozen=True)
class LayerSize:
    """The size of a convolution as its kernel sees it: backward, inputs are the channels of the gradient it reads.

    pixels: of the output of one member. width: of an image of the output. statistics: whether an epilogue leaves some.
    shared_memory: bytes that a program may have.
    """

    members: int
    pixels: int
    width: int
    inputs: int
    outputs: int
    backward: bool = False
    statistics: bool = False
    float32: bool = False
    shared_memory: int = SHARED_MEMORY

    @property
    def element_size(self) -> int:
        """Return the bytes of a number."""
        return 4 if self.float32 else 2

    def blocks(self, tile_pixels: int) -> tuple[int, int]:
        """Return the number of blocks into which a member's pixels are divided, and the tiles of each."""
        return divide(self.pixels, tile_pixels, moment_blocks(self.outputs) if self.statistics else None)

    def programs(self, tile_pixels: int, tile_outputs: int) -> int:
        """Return how many programs a launch with such tiles has."""
        return self.members * self.blocks(tile_pixels)[0] * ceil_div(self.outputs, tile_outputs)


def divide(pixels: int, tile_pixels: int, max_blocks: int | None) -> tuple[int, int]:
    """Divide pixels into blocks of tiles; returns the number of blocks, and of tiles in each."""
    needed = ceil_div(pixels, tile_pixels)
    tiles = ceil_div(needed, min(needed, max_blocks or needed))
    return ceil_div(needed, tiles), tiles


def fit(tile: AnyTile, shared_memory: int, element_size: int = 2) -> AnyTile:
    """Return a tile with fewer stages, and then fewer pixels, where a GPU has too little shared memory."""
    while tile.stages * tile.bytes_of_stage(element_size) > shared_memory and (tile.stages > 2 or tile.pixels > 32):
        smaller = {"stages": tile.stages - 1} if tile.stages > 2 else {"pixels": tile.pixels // 2}
        tile = replace(tile, **smaller)
    return tile


def fit_sweep(tile: AnyTile, width: int, shared_memory: int, element_size: int = 2) -> AnyTile:
    """Return the tile of a sweep with fewer stages where a GPU has too little shared memory.

    width: of an image of the output; a stage holds at least one row of it, even where the tile has fewer pixels.
    """
    with_whole_rows = replace(tile, pixels=max(tile.pixels, dot_size(width)))
    return replace(tile, stages=fit(with_whole_rows, shared_memory, element_size).stages)


def row_tile(layer: LayerSize, taps: int) -> Tile:
    """Return the tile of a kernel that reads rows of the window."""
    return Tile(64, dot_size(layer.outputs), dot_size(taps * layer.inputs), stages=1)


def tap_tile(layer: LayerSize) -> Tile:
    """Return the tile of a kernel that goes through the window tap by tap."""
    return fit(_fastest_tap_tile(layer), layer.shared_memory, layer.element_size)


def _fastest_tap_tile(layer: LayerSize) -> Tile:
    """Return the tile that was fastest on an H200."""
    outputs, inputs = dot_size(layer.outputs), dot_size(layer.inputs)
    if layer.float32:
        return Tile(64, min(128, outputs), min(32, inputs))
    if outputs == 16:
        return Tile(128, 16, min(64, inputs))
    if outputs == 32 or inputs <= 32:
        return Tile(128, min(64, outputs), min(32, inputs), stages=4, registers=128)
    if outputs == 64:
        if layer.pixels >= MANY_PIXELS and layer.programs(128, 64) < 2 * MULTIPROCESSORS:
            return Tile(256, 64, 64, warps=8, registers=168 if layer.backward else None)
        return Tile(128, 64, 32, stages=4, registers=128) if layer.backward else Tile(128, 64, 64)
    programs = layer.programs(256, 128)
    if programs > FULL_WAVE * MULTIPROCESSORS * ceil_div(programs, MULTIPROCESSORS):
        return Tile(256, 128, 64, warps=8)
    tile = Tile(64, 128, 64) if layer.backward else Tile(128, 64, 64)
    if layer.programs(tile.pixels, tile.outputs) >= FEWEST_WAVES * MULTIPROCESSORS:
        return tile
    return Tile(64, 64, min(128, inputs))


def back_tile(layer: LayerSize, cells: int) -> Tile:
    """Return the tile of the input gradient of a layer with a stride. cells: of a member; a tile's pixels are cells."""
    programs = layer.members * ceil_div(cells, 128) * ceil_div(layer.outputs, 64)
    pixels = 128 if programs >= FEWEST_WAVES * MULTIPROCESSORS else 64
    tile = Tile(pixels, min(64, dot_size(layer.outputs)), min(64, dot_size(layer.inputs)))
    return fit(tile, layer.shared_memory, layer.element_size)


def can_be_swept(layer: LayerSize) -> bool:
    """Tell whether a layer with a window of 3 × 3 is narrow enough for the kernel that keeps three rows at hand."""
    columns, outputs, width = 3 * layer.inputs, layer.outputs, layer.width
    if width > 128:
        return False
    if layer.float32:
        return columns <= WIDEST_SWEEP_FLOAT32 and outputs <= 32
    if outputs <= 16 and columns <= WIDEST_SWEEP:
        return True
    if outputs <= 32 and (columns <= 64 or (columns <= WIDEST_SWEEP and width >= 32)):
        return True
    # More of either only where a tile is one row of 32 pixels: larger ones need more registers than there are.
    is_small = dot_size(width) == 32
    if layer.backward and outputs <= 16:
        return is_small and columns <= WIDEST_SWEEP_BACK
    return is_small and outputs <= 64 and columns <= 64


def sweep_tile(layer: LayerSize, columns: int) -> Tile:
    """Return the tile of a sweep. columns: of the tile, a power of two that is at least 3 × inputs."""
    return fit_sweep(_fastest_sweep_tile(layer, columns), layer.width, layer.shared_memory, layer.element_size)


def _fastest_sweep_tile(layer: LayerSize, columns: int) -> Tile:
    """Return the tile of a sweep that was fastest on an H200."""
    if layer.outputs > 32 or columns > 128 or (columns > 64 and layer.outputs > 16):
        return Tile(32, layer.outputs, columns, warps=2)
    if columns <= 32 or layer.outputs <= 8:
        return Tile(32, layer.outputs, columns, warps=2 if layer.backward and layer.outputs > 8 else 1)
    if columns == 64 and layer.outputs <= 16 and not layer.backward:
        return Tile(32, layer.outputs, columns, warps=1, registers=168)
    return Tile(64, layer.outputs, columns, warps=2)


def has_narrow_products(inputs: int, outputs: int, rows: int, taps: int) -> bool:
    """Tell whether the gradient of a layer's weights is computed by sweeps or by rows, not by taps."""
    max_columns, max_outputs = WIDEST_PRODUCTS
    return rows <= 3 and taps * inputs <= max_columns and outputs <= max_outputs


def products_by_sweep(columns: int, outputs: int, width: int, shared_memory: int = SHARED_MEMORY) -> ProductTile:
    """Return the tile of a sweep for the gradient of weights. columns: taps × inputs. width: of an output's image."""
    inputs = dot_size(columns)
    pixels, warps = (64, 2) if inputs <= 64 else (128, 4)
    return fit_sweep(SweptProductTile(pixels, dot_size(outputs), inputs, warps), width, shared_memory)


def products_by_rows(columns: int, outputs: int) -> ProductTile:
    """Return the tile of a kernel that reads rows of the window, for the gradient of weights."""
    return ProductTile(64, dot_size(outputs), dot_size(columns), stages=2)


def products_by_taps(inputs: int, outputs: int, shared_memory: int = SHARED_MEMORY) -> ProductTile:
    """Return the tile of a kernel that takes three taps of the window at a time, for the gradient of weights."""
    programs = 2 * MULTIPROCESSORS if inputs > 32 else 4 * MULTIPROCESSORS
    tile = ProductTile(64, min(64, dot_size(outputs)), min(64, dot_size(inputs)), programs=programs)
    return fit(tile, shared_memory)

"""Convolutions of stacked members: one launch for all of them, where there are few channels or many members.

Images of all members are one batch (members × images, channels, height, width), stored channels last; weights are
stacked, (members, outputs, inputs, rows, taps), the inputs innermost in memory. A layer of 16 and 8 channels on 32×32
images has a thousand weights: cuDNN's kernels, made for many channels and one network, leave most of a GPU idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.cuda import tiles
from structured_ensembles.cuda.launch import empty, launch
from structured_ensembles.cuda.launch_grid import Sweep, ceil_div, channel_units, dot_size, moment_blocks, power_of_two
from structured_ensembles.cuda.tiles import LayerSize, Tile

LARGEST = 2**31  # elements of a member's images: kernels count these in 32 bits
LARGEST_WINDOW = 32  # rows and taps: kernels keep a bit for each
# What a kernel computes from a tile of outputs, see kernels/epilogue.py.
NO_EPILOGUE, MOMENTS, NORM_SUMS, RUNNING_NORM, BIAS = 0, 1, 2, 3, 4
NO_RELU, BY_INPUT, BY_OUTPUT = 0, 1, 2  # how the gradient of a norm's ReLU is found: from the norm's input or output
LEAST_OUTPUTS = 8  # of a tile of a sweep: what a matrix instruction has at least


@dataclass(frozen=True)
class Window:
    """Stride and padding of a convolution, the same in both directions."""

    stride: int = 1
    padding: int = 0

    def output_size(self, size: int, taps: int) -> int:
        """Return the height or width of the output, of that of the input and of the window."""
        return max((size + 2 * self.padding - taps) // self.stride + 1, 0)


@dataclass(frozen=True)
class BlockSums:
    """Statistics of each block of rows, which an epilogue has computed: partial (members, 3, blocks, channels).

    Mean, squared deviations and number of rows; or the gradients of a norm's weight and bias.
    """

    partial: Tensor


@dataclass(frozen=True)
class NormBefore:
    """The batch norm whose output a convolution reads: the tensors that its gradient needs.

    norm_input, norm_output: (members × images, channels, height, width). saved: (members, 2, channels), mean and
    1 / deviation. mask: how the gradient of its ReLU is found, `NO_RELU`, `BY_INPUT` or `BY_OUTPUT`.
    """

    norm_input: Tensor
    norm_output: Tensor
    saved: Tensor
    weight: Tensor  # (members, channels)
    bias: Tensor
    mask: int


@dataclass(frozen=True)
class RunningNorm:
    """A batch norm in prediction: weight, bias, running mean and variance, each (members, channels), in float32."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    eps: float


@dataclass(frozen=True)
class _Epilogue:
    """What a kernel goes on to compute from its outputs, see kernels/epilogue.py, and the tensors that this reads.

    pivot: a guess of the mean of each output, or a running mean. saved: `NormBefore.saved`, or a running variance.
    """

    number: int = NO_EPILOGUE
    norm_input: Tensor | None = None
    norm_output: Tensor | None = None
    pivot: Tensor | None = None
    saved: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    mask: int = NO_RELU
    eps: float = 0.0

    def tensors(self, unused: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in the kernels' order; `unused` stands for each that this epilogue does not read."""
        tensors = (self.norm_input, self.norm_output, self.pivot, self.saved, self.weight, self.bias)
        return tuple(unused if tensor is None else tensor for tensor in tensors)


def fits(x: Tensor, weight: Tensor, window: Window) -> bool:
    """Tell whether the kernels below can compute this layer: bfloat16 on a GPU, channels last."""
    return x.dtype == torch.bfloat16 and _can_run(x, weight, window, len(x) // len(weight))


def fits_prediction(x: Tensor, weight: Tensor, window: Window) -> bool:
    """Tell whether `predict` can compute this layer: bfloat16, or float32 where PyTorch may use TF32 for it."""
    if x.dtype != torch.bfloat16 and not (x.dtype == torch.float32 and allows_tf32(x.device)):
        return False
    return _can_run(x, weight, window, len(x))  # images of all members, or shared by them


def allows_tf32(device: torch.device) -> bool:
    """Tell whether PyTorch's convolutions may multiply float32 as TF32, by default yes: as our kernels then do."""
    settings = getattr(torch.backends.cudnn, "conv", None)  # since PyTorch 2.9
    allowed = torch.backends.cudnn.allow_tf32 if settings is None else settings.fp32_precision == "tf32"
    return allowed and (device.type != "cuda" or _has_tf32(device))


@cache
def _has_tf32(device: torch.device) -> bool:
    """Tell whether a GPU multiplies in TF32: NVIDIA's do since Ampere; elsewhere PyTorch computes float32 in full."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _can_run(x: Tensor, weight: Tensor, window: Window, images: int) -> bool:
    """Tell whether device, layout and size are such that kernels can run. images: of a member's output, at most."""
    height, width = _output_size(x, weight, window)
    return (
        x.is_cuda
        and find_spec("triton") is not None
        and x.dtype == weight.dtype
        and 0 < x.numel() < LARGEST
        and 0 < images * height * width * weight.shape[1] < LARGEST
        and weight.numel() < LARGEST
        and max(weight.shape[3:]) <= LARGEST_WINDOW
        and weight.permute(0, 1, 3, 4, 2).is_contiguous()
    )


def _output_size(x: Tensor, weight: Tensor, window: Window) -> tuple[int, int]:
    """Return height and width of the output of a convolution of x with weight."""
    (height, width), (rows, taps) = x.shape[2:], weight.shape[3:]
    return window.output_size(height, rows), window.output_size(width, taps)


@cache
def shared_memory_of(device: torch.device) -> int:
    """Return how many bytes of shared memory a program may have."""
    if device.type != "cuda":
        return tiles.SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    # NVIDIA's GPUs give a program more than the default to a kernel that asks for it, as Triton does; AMD's do not.
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block


def rows_per_member(x: Tensor, weight: Tensor, window: Window) -> int:
    """Return how many pixels each member's output has; PyTorch refuses to normalise a single one."""
    height, width = _output_size(x, weight, window)
    return len(x) // len(weight) * height * width


def forward(
    x: Tensor, weight: Tensor, window: Window, expected_mean: Tensor | None = None
) -> tuple[Tensor, BlockSums | None]:
    """Convolve x (members × images, inputs, height, width) with weight (members, outputs, inputs, rows, taps).

    expected_mean: None, or a guess of the mean of each output, (members, outputs), such as a norm's running mean. Then
    also return the moments that a batch norm of the result needs: the nearer the guess, the more exact the variance.
    """
    y = _empty(x, (len(x), weight.shape[1], *_output_size(x, weight, window)))
    epilogue = _Epilogue() if expected_mean is None else _Epilogue(MOMENTS, pivot=expected_mean)
    return y, _convolve(_Job(x, weight, y, epilogue), window)


def predict(
    x: Tensor,
    weight: Tensor,
    window: Window,
    bias: Tensor | None = None,
    norm: RunningNorm | None = None,
    add: Tensor | None = None,
    *,
    relu: bool = False,
    shared: bool = False,
) -> Tensor:
    """Convolve x as `forward` does, add the bias, normalise by running statistics, add `add`, apply the ReLU.

    bias: (members, outputs). add: of the shape of the result. shared: x is (images, …), the same for all members.
    Float32 is multiplied as TF32; the result is rounded to it, which the next convolution would do anyway.
    """
    images = len(x) * len(weight) if shared else len(x)
    y = _empty(x, (images, weight.shape[1], *_output_size(x, weight, window)))
    if bias is not None and norm is not None:
        norm, bias = replace(norm, mean=norm.mean - bias), None
    if norm is not None:
        epilogue = _Epilogue(
            RUNNING_NORM, pivot=norm.mean, saved=norm.variance, weight=norm.weight, bias=norm.bias, eps=norm.eps
        )
    else:
        epilogue = _Epilogue() if bias is None else _Epilogue(BIAS, bias=bias)
    job = _Job(x, weight, y, epilogue, add, relu=relu, shared=shared, tf32=x.dtype == torch.float32)
    _convolve(job, window)
    return y


def input_gradient(
    dy: Tensor,
    weight: Tensor,
    window: Window,
    shape: torch.Size,
    add: Tensor | None = None,
    norm: NormBefore | None = None,
) -> tuple[Tensor, BlockSums | None]:
    """Return the gradient of the inputs, whose shape is (members × images, inputs, height, width).

    add: a gradient of the inputs by other readers of them, which is added. norm: the batch norm whose output the inputs
    are, if any; then returns the gradient of the input of its ReLU, and sums.
    """
    dx = _empty(dy, shape)
    epilogue = _Epilogue()
    if norm is not None:
        epilogue = _Epilogue(
            NORM_SUMS, norm.norm_input, norm.norm_output, saved=norm.saved, weight=norm.weight, bias=norm.bias,
            mask=norm.mask,
        )  # fmt: skip
    job = _Job(dy, weight, dx, epilogue, add, backward=True)
    if window.stride > 1 or job.rows != job.taps:
        return dx, _convolve_back_strided(job, window)
    return dx, _convolve(job, Window(1, job.rows - 1 - window.padding))  # a convolution with the window turned around


class _Job:
    """A convolution of x to y, or of gradients from x back to y, and the arguments that all kernels have."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        epilogue: _Epilogue,
        add: Tensor | None = None,
        *,
        backward: bool = False,
        relu: bool = False,
        shared: bool = False,
        tf32: bool = False,
    ) -> None:
        self.x, self.weight, self.y, self.epilogue, self.add = x, weight, y, epilogue, add
        self.members, _, _, self.rows, self.taps = weight.shape
        self.inputs, self.outputs = x.shape[1], y.shape[1]
        self.images = len(y) // self.members
        self.size = LayerSize(
            self.members, self.images * y.shape[2] * y.shape[3], y.shape[3], self.inputs, self.outputs, backward,
            statistics=epilogue.number in (MOMENTS, NORM_SUMS), float32=x.dtype == torch.float32,
            shared_memory=shared_memory_of(x.device),
        )  # fmt: skip
        self.input_units, input_unit = channel_units(self.inputs)
        self.output_units, output_unit = channel_units(self.outputs)
        self.options = {"RELU": relu, "SHARED": shared, "TF32": tf32}  # of `predict`
        self.constants: dict[str, Any] = {
            "INPUT_UNIT": input_unit, "OUTPUT_UNIT": output_unit, "ADD": add is not None, "EPILOGUE": epilogue.number,
            "MASK": epilogue.mask,
        }  # fmt: skip

    def tensors(self, blocks: int) -> tuple[tuple[Tensor, ...], BlockSums | None]:
        """Return the tensor arguments of a kernel of so many blocks, and the statistics that its epilogue will fill."""
        shape = (self.members, 3, blocks, self.outputs)
        sums = BlockSums(empty(*shape, like=self.y)) if self.size.statistics else None
        tensors = (self.x, self.weight, self.y, self.y if sums is None else sums.partial)
        return (*tensors, self.y if self.add is None else self.add, *self.epilogue.tensors(unused=self.y)), sums

    def is_whole(self, tile: Tile) -> bool:
        """Tell whether inputs and outputs are multiples of those of a tile, so that none is cut off."""
        return self.inputs % tile.inputs == 0 and self.outputs % tile.outputs == 0


def _convolve(job: _Job, window: Window) -> BlockSums | None:
    """Launch the kernel for a convolution; backward, one with stride 1."""
    if job.rows == job.taps == 3 and window.stride == 1 and tiles.can_be_swept(job.size):
        return _convolve_by_sweep(job, window)
    if job.rows <= 3 and job.taps * job.inputs <= tiles.WIDEST_ROW and job.outputs <= 64:
        return _convolve_by_rows(job, window)
    return _convolve_by_taps(job, window)


def _convolve_by_rows(job: _Job, window: Window) -> BlockSums | None:
    """Launch the kernel for narrow layers, which reads a row of the window in one piece."""
    from structured_ensembles.cuda.kernels.convolution import convolve_by_rows

    return _launch_by_pixels(convolve_by_rows, job, window, tiles.row_tile(job.size, job.taps))


def _convolve_by_taps(job: _Job, window: Window) -> BlockSums | None:
    """Launch the kernel for wide layers, which goes through the window tap by tap."""
    from structured_ensembles.cuda.kernels.wide_convolution import convolve_by_taps

    tile = tiles.tap_tile(job.size)
    return _launch_by_pixels(convolve_by_taps, job, window, tile, WHOLE=job.is_whole(tile))


def _launch_by_pixels(kernel: Any, job: _Job, window: Window, tile: Tile, **constants: bool) -> BlockSums | None:
    """Launch a kernel whose programs have blocks of a member's pixels, in tiles. constants: that only it has."""
    blocks, count = job.size.blocks(tile.pixels)
    tensors, sums = job.tensors(blocks)
    launch(
        kernel, (blocks, job.members, ceil_div(job.outputs, tile.outputs)),
        *tensors, job.size.pixels, *job.x.shape[2:], window.padding, job.input_units, job.output_units, count,
        job.epilogue.eps, STRIDE=window.stride, OUT_WIDTH=job.y.shape[3], OUT_PIXELS=job.y.shape[2] * job.y.shape[3],
        ROWS=job.rows, TAPS=job.taps, BACKWARD=job.size.backward, **job.constants, **job.options, **constants,
        HIGH=tile.pixels, WIDE=tile.outputs, DEEP=tile.inputs, **tile.options,
    )  # fmt: skip
    return sums


def _convolve_by_sweep(job: _Job, window: Window) -> BlockSums | None:
    """Launch the kernel for narrow layers with a window of 3 × 3 and stride 1."""
    from structured_ensembles.cuda.kernels.convolution import convolve_by_sweep

    tile = tiles.sweep_tile(job.size, dot_size(3 * job.inputs))
    height, width = job.y.shape[2:]
    sweep = Sweep.of(job.images, height, width, job.members, tile.pixels)
    blocks = ceil_div(job.images, sweep.images) * sweep.strips
    tensors, sums = job.tensors(blocks)
    launch(
        convolve_by_sweep, (blocks, job.members),
        *tensors, job.images, job.x.shape[2], height, window.padding, job.input_units, job.output_units,
        sweep.strips, sweep.strip, job.epilogue.eps, WIDTH=job.x.shape[3], OUT_WIDTH=width, BACKWARD=job.size.backward,
        **job.constants, **job.options, IMAGES=sweep.images, HIGH=max(sweep.pixels, 16 * tile.warps),
        WIDE=max(LEAST_OUTPUTS, power_of_two(job.outputs)), DEEP=tile.inputs, STAGES=tile.stages, **tile.options,
    )  # fmt: skip
    return sums


def _convolve_back_strided(job: _Job, window: Window) -> BlockSums | None:
    """Launch the kernel for the input gradient of a layer with a stride, or with a window that is not square."""
    from structured_ensembles.cuda.kernels.wide_convolution import convolve_back_strided

    height, width = job.y.shape[2:]
    across = ceil_div(width, window.stride)
    cells = ceil_div(height, window.stride) * across
    tile = tiles.back_tile(job.size, job.images * cells)
    max_blocks = 2 * moment_blocks(job.outputs) if job.size.statistics else None
    blocks, count = tiles.divide(job.images * cells, tile.pixels, max_blocks)
    tensors, sums = job.tensors(blocks)
    launch(
        convolve_back_strided, (blocks, job.members, ceil_div(job.outputs, tile.outputs)),
        *tensors, job.images, *job.x.shape[2:], window.padding, job.input_units, job.output_units, count,
        STRIDE=window.stride, OUT_HEIGHT=height, OUT_WIDTH=width, CELLS=cells, CELLS_ACROSS=across,
        ROWS=job.rows, TAPS=job.taps, **job.constants, WHOLE=job.is_whole(tile),
        HIGH=tile.pixels, WIDE=tile.outputs, DEEP=tile.inputs, **tile.options,
    )  # fmt: skip
    return sums


def _empty(like: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return images that a kernel will fill, channels last, in the type of `like`."""
    return empty(*shape, like=like, dtype=like.dtype, channels_last=True)

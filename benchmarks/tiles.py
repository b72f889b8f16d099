"""Time the convolution kernels layer by layer: with the tiles that `cuda/tiles.py` takes, with others, and cuDNN's.

    python benchmarks/tiles.py --json benchmarks/results/tiles-h200.json        two minutes on an H200
    python benchmarks/tiles.py --layers "ResNet18 64" --json FILE               layers whose names begin so
    TRITON_INTERPRET=1 python benchmarks/tiles.py --device cpu --tiny           a trial by Triton's interpreter

Microseconds of a launch at batch 128, as in a training step in bfloat16: forward with the moments of the batch norm
behind it, the gradient of the inputs with the sums of the batch norm before it, the gradient of the weights with the
merging of its blocks. cuDNN computes the convolution only, one member after the other. A star is a tile that is more
than 5 % faster than ours: look there first. All is captured in CUDA graphs, so that no launch waits for Python.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from recording import arguments_of, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.cuda import convolution, tiles
from structured_ensembles.cuda.convolution import NormBefore, Window
from structured_ensembles.cuda.launch import compile_only
from structured_ensembles.cuda.launch_grid import dot_size
from structured_ensembles.cuda.tiles import ProductTile, Tile
from structured_ensembles.cuda.weight_gradient import weight_gradient

PASSES = ("forward", "input gradient", "weight gradient")
CALLS, ROUNDS = 10, 5  # calls in a graph, and replays of it


@dataclass(frozen=True)
class Layer:
    """A 3 × 3 convolution of some members. size: height and width of an image."""

    members: int
    inputs: int
    outputs: int
    size: int
    stride: int = 1
    images: int = 128


LAYERS = {
    "ResNet18 64": Layer(1, 64, 64, 32),
    "ResNet18 128": Layer(1, 128, 128, 16),
    "ResNet18 256": Layer(1, 256, 256, 8),
    "ResNet18 512": Layer(1, 512, 512, 4),
    "ResNet18 64-128, stride": Layer(1, 64, 128, 32, stride=2),
    "ResNet18 256-512, stride": Layer(1, 256, 512, 8, stride=2),
    "four coupled halves, 32": Layer(4, 32, 32, 32),
    "four coupled halves, 64": Layer(4, 64, 64, 16),
    "four coupled halves, 128": Layer(4, 128, 128, 8),
    "four coupled halves, 256": Layer(4, 256, 256, 4),
    "four coupled halves, 32-64, stride": Layer(4, 32, 64, 32, stride=2),
    "four quarters, 64-16": Layer(4, 64, 16, 32),
    "four quarters, 16-64": Layer(4, 16, 64, 32),
    "four quarters, 128-32": Layer(4, 128, 32, 16),
    "four quarters, 32-128": Layer(4, 32, 128, 16),
    "five half ResNet20s, 16-8": Layer(5, 16, 8, 32),
    "five half ResNet20s, 8-16": Layer(5, 8, 16, 32),
    "five half ResNet20s, 32-16": Layer(5, 32, 16, 16),
    "five half ResNet20s, 64-32": Layer(5, 64, 32, 8),
    "five half VGG11s, 128": Layer(5, 128, 128, 8),
    "five half VGG11s, 256": Layer(5, 256, 256, 4),
    "WRN-28-10 160": Layer(1, 160, 160, 32),
    "WRN-28-10 320": Layer(1, 320, 320, 16),
    "WRN-28-10 640": Layer(1, 640, 640, 8),
}
BY_TAPS = (
    Tile(64, 64, 64), Tile(64, 64, 128), Tile(64, 128, 64), Tile(128, 16, 64), Tile(128, 32, 32, stages=4),
    Tile(128, 32, 64, stages=4), Tile(128, 64, 32, stages=4), Tile(128, 64, 32, stages=4, registers=128),
    Tile(128, 64, 64), Tile(128, 128, 64, warps=8), Tile(256, 64, 64, warps=8),
    Tile(256, 64, 64, warps=8, registers=168), Tile(256, 128, 64, warps=8),
)  # fmt: skip
BY_SWEEP = (
    Tile(32, 0, 0, warps=1), Tile(32, 0, 0, warps=1, registers=168), Tile(32, 0, 0, warps=2), Tile(64, 0, 0, warps=2),
    Tile(64, 0, 0, warps=4),
)  # fmt: skip
OF_WEIGHTS = (
    ProductTile(64, 64, 64, programs=264), ProductTile(64, 64, 64, programs=528),
    ProductTile(32, 64, 64, stages=4, programs=264), ProductTile(64, 128, 64, warps=8, programs=264),
    ProductTile(64, 64, 32, programs=528), ProductTile(64, 64, 16, programs=528), ProductTile(64, 16, 64, programs=264),
    ProductTile(64, 32, 64, programs=264),
)  # fmt: skip


class Work:
    """The tensors of a layer and its three passes."""

    def __init__(self, layer: Layer, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32  # the interpreter has no bfloat16
        samples, out = layer.members * layer.images, -(-layer.size // layer.stride)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.layer, self.window = layer, Window(layer.stride, 1)
        self.x = draw(samples, layer.size, layer.size, layer.inputs).permute(0, 3, 1, 2)
        self.dy = draw(samples, out, out, layer.outputs).permute(0, 3, 1, 2)
        self.weight = draw(layer.members, layer.outputs, 3, 3, layer.inputs).permute(0, 1, 4, 2, 3) / 10
        saved = torch.ones(layer.members, 2, layer.inputs, device=device)
        ones = torch.ones(layer.members, layer.inputs, device=device)
        self.norm = NormBefore(self.x, self.x, saved, ones, ones, convolution.BY_OUTPUT)
        self.mean = torch.zeros(layer.members, layer.outputs, device=device)

    def run(self, name: str) -> None:
        """Launch our kernels of a pass."""
        if name == "forward":
            convolution.forward(self.x, self.weight, self.window, self.mean)
        elif name == "input gradient":
            convolution.input_gradient(self.dy, self.weight, self.window, self.x.shape, norm=self.norm)
        else:
            weight_gradient(self.x, self.dy, self.weight, self.window)

    def run_cudnn(self, name: str) -> None:
        """Compute a pass by PyTorch's convolution, one member after the other."""
        count, stride = self.layer.members, self.layer.stride
        mask = [name == "input gradient", name == "weight gradient", False]
        for x, dy, weight in zip(self.x.chunk(count), self.dy.chunk(count), self.weight, strict=True):
            if name == "forward":
                F.conv2d(x, weight, stride=stride, padding=1)
            else:
                torch.ops.aten.convolution_backward(
                    dy, x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, mask
                )

    def candidates(self, name: str) -> Iterator[tuple[str, Tile]]:
        """Yield tiles that fit a pass, with the function of `cuda/tiles.py` that they stand for."""
        inputs, outputs = self.layer.inputs, self.layer.outputs
        if name == "weight gradient":
            fitting = [tile for tile in OF_WEIGHTS if _fits(tile, inputs, outputs) and tile.inputs >= min(64, inputs)]
            yield from (("products_by_taps", tile) for tile in fitting)
            return
        if name == "input gradient":
            inputs, outputs = outputs, inputs
        fitting = [tile for tile in BY_TAPS if _fits(tile, inputs, outputs)]
        if self.layer.stride > 1 and name == "input gradient":
            yield from (("back_tile", tile) for tile in fitting)
            return
        yield from (("tap_tile", tile) for tile in fitting)
        if self.layer.stride == 1 and 3 * inputs <= 256 and outputs <= 64:
            columns = dot_size(3 * inputs)
            yield from (("sweep_tile", replace(tile, outputs=outputs, inputs=columns)) for tile in BY_SWEEP)


def _fits(tile: Tile, inputs: int, outputs: int) -> bool:
    """Tell whether a tile is not larger than a layer, and not so narrow that it reads everything many times."""
    wide_enough = tile.outputs >= min(64, dot_size(outputs)) or isinstance(tile, ProductTile)
    return wide_enough and tile.outputs <= dot_size(outputs) and tile.inputs <= dot_size(inputs)


def with_tile(function: str, tile: Tile, run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs with a tile instead of the one that `function` returns."""

    def changed() -> None:
        by_sweep = patch.object(tiles, "can_be_swept", lambda *_: function == "sweep_tile")
        others = [] if function in ("products_by_taps", "back_tile") else [by_sweep]
        if function == "tap_tile":
            others.append(patch.object(tiles, "WIDEST_ROW", 0))
        if function == "products_by_taps":
            others.append(patch.object(tiles, "has_narrow_products", lambda *_: False))
        for other in others:
            other.start()
        try:
            with patch.object(tiles, function, lambda *_: tile):
                run()
        finally:
            for other in others:
                other.stop()

    return changed


def main() -> None:
    """Measure every layer, and print and record the table."""
    arguments = arguments_of(__doc__, layers=[""], tiny=False)
    chosen = [name for name in LAYERS if name.startswith(tuple(arguments.layers))]
    if arguments.device.startswith("cuda"):
        compile_all(chosen, arguments)
    rows, lines = [], []
    for name in chosen:
        for figures in measure(work_of(name, arguments), arguments):
            rows.append({"layer": name, **vars(LAYERS[name]), **figures})
            lines.append(format_line(rows[-1]))
            print("  ".join(lines[-1]), flush=True)
    print(text_table(("layer", "pass", "cuDNN", "ours", "fastest", "its tile", ""), lines))
    record(arguments, rows)


def work_of(name: str, arguments: argparse.Namespace) -> Work:
    """Return the tensors of a layer; few and small images for a trial."""
    layer = LAYERS[name]
    return Work(replace(layer, images=2, size=min(layer.size, 4)) if arguments.tiny else layer, arguments.device)


def runs_of(work: Work) -> Iterator[tuple[str, Tile | None, Callable[[], None]]]:
    """Yield every pass with our tile (None) and with all others."""
    for name in PASSES:
        yield name, None, lambda name=name: work.run(name)
        for function, tile in work.candidates(name):
            yield name, tile, with_tile(function, tile, lambda name=name: work.run(name))


def compile_all(names: list[str], arguments: argparse.Namespace) -> None:
    """Compile all kernels in parallel, before the first is timed."""
    with compile_only():
        for name in names:
            for _, _, run in runs_of(work_of(name, arguments)):
                with suppress(Exception):  # one that cannot be compiled is named when it is timed
                    run()


def measure(work: Work, arguments: argparse.Namespace) -> Iterator[dict]:
    """Time every pass of a layer in microseconds."""
    times: dict[str, list[tuple[float, str]]] = {name: [] for name in PASSES}
    ours = {}
    for name, tile, run in runs_of(work):
        try:
            seconds = time_of(run, arguments)
        except Exception as error:  # such as more shared memory than a GPU has
            print(f"{name}, {tile}: {type(error).__name__}")
            continue
        if tile is None:
            ours[name] = seconds
        else:
            times[name].append((seconds, describe(tile)))
    for name in PASSES:
        cudnn = time_of(lambda name=name: work.run_cudnn(name), arguments)
        others = sorted(times[name])
        yield {"pass": name, "cudnn": cudnn, "ours": ours[name], "others": others}


def time_of(run: Callable[[], None], arguments: argparse.Namespace) -> float:
    """Return the microseconds of one call: the median over replays of a CUDA graph of several; NaN on a CPU."""
    run()
    if not arguments.device.startswith("cuda"):
        return float("nan")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def describe(tile: Tile) -> str:
    """Name a tile: pixels × outputs × inputs, and its options."""
    words = [f"{tile.pixels} × {tile.outputs} × {tile.inputs}", f"{tile.warps} warps", f"{tile.stages} stages"]
    words += [] if tile.registers is None else [f"{tile.registers} registers"]
    words += [f"{tile.programs} programs"] if isinstance(tile, ProductTile) else []
    return ", ".join(words)


def format_line(row: dict) -> tuple[str, ...]:
    """Format a line of the table."""
    fastest, tile = row["others"][0] if row["others"] else (row["ours"], "")
    star = "*" if fastest < 0.95 * row["ours"] else ""
    return row["layer"], row["pass"], f"{row['cudnn']:.1f}", f"{row['ours']:.1f}", f"{fastest:.1f}", tile, star


if __name__ == "__main__":
    main()

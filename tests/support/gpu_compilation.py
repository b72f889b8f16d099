"""Compile the kernels of a training step and of a prediction for a GPU that is not there, by Triton and ptxas.

    python -m tests.support.gpu_compilation 80 166912     an A100: compute capability, bytes of shared memory

The interpreter, which runs our kernels in the other tests, is lenient: it takes loops that change a type, sizes that no
register file holds, options that a GPU does not know. This prints a JSON list of the compiled kernels: name, shared
memory, whether it waits for earlier kernels before its first access to memory, error. It is a process of its own,
without TRITON_INTERPRET. Kernels are compiled for `dependent_launches` where the GPU has them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import structured_ensembles as se
from structured_ensembles.cuda import convolution, launch
from structured_ensembles.cuda.batch_drawing import BatchDrawer
from structured_ensembles.cuda.compilation import compile_networks
from structured_ensembles.cuda.prediction import compile_predictions
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack
from structured_ensembles.data.feeds import TableFeed, feed_for
from structured_ensembles.zoo.resnet import Block

MEMBERS, IMAGES, SIZE = 3, 64, 32
HOPPER = 90  # the first GPUs that can start a kernel while the one before ends
TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


def make_network() -> nn.Module:
    """Make a network whose layers take every kernel: narrow and wide ones, some with a stride or without a norm.

    It has no linear layer: PyTorch's product in float32 of bfloat16 is for GPUs only.
    """
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Block(16, 32, stride=2, projection=False), nn.Conv2d(32, 128, 1), nn.BatchNorm2d(128), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(128, 128, 3, padding=1, bias=False),
        nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Launches:
    """Takes the place of `launch`: keeps what each kernel is compiled with, once, and launches none."""

    def __init__(self, dependent: bool) -> None:
        self.dependent = dependent
        self.kinds: dict[str, tuple[Any, ...]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        names = kernel.arg_names
        values = dict(zip(names, arguments, strict=False)) | {name: named[name] for name in names if name in named}
        values.setdefault("DEPENDENT", self.dependent)
        options = {name: value for name, value in named.items() if name not in names}
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        aligned: dict[tuple[int, ...], list[list[Any]]] = {}
        for position, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[position,] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, Tensor) or (signature[parameter.name] == "i32" and value % 16 == 0):
                aligned[position,] = [["tt.divisibility", 16]]
        key = repr((kernel.fn.__name__, signature, constants, options))
        self.kinds.setdefault(key, (kernel, signature, constants, aligned, options))

    def compile_for(self, target: GPUTarget) -> Iterator[Mapping[str, Any]]:
        """Compile every kernel that was launched, and tell how much shared memory it wants."""
        for kernel, signature, constants, aligned, options in self.kinds.values():
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
            description: dict[str, Any] = {"kernel": kernel.fn.__name__, "shared": 0, "waits": False, "error": None}
            try:
                compiled = triton.compile(source, target=target, options=options)
                description["shared"] = compiled.metadata.shared
                description["waits"] = waits_first(compiled.asm["ptx"])
            except Exception as error:  # any of them is what the test looks for
                description["error"] = f"{type(error).__name__}: {error}"
            yield description


def waits_first(ptx: str) -> bool:
    """Tell whether a kernel waits for earlier ones, and reads and writes the GPU's memory only then."""
    wait = ptx.find("griddepcontrol.wait")
    accesses = re.finditer(r"\b(ld|st|atom|red|cp\.async)\.[\w.]*global", ptx)
    return 0 <= wait < next(access.start() for access in accesses)


@contextmanager
def as_on_a_gpu(launches: Launches, shared_memory: int) -> Iterator[None]:
    """Let tensors of the host count as those of a GPU, with so much shared memory, and launch nothing."""
    with ExitStack() as stack:
        plain = launch.launch
        for module in [module for name, module in sys.modules.items() if name.startswith("structured_ensembles.cuda.")]:
            if vars(module).get("launch") is plain:
                stack.enter_context(patch.object(module, "launch", launches))
        stack.enter_context(patch.object(convolution, "shared_memory_of", lambda device: shared_memory))
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", True))
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        stack.enter_context(torch.no_grad())
        yield


def record_launches(shared_memory: int, dependent: bool) -> Launches:
    """Record the launches of a training step (batches, forward, backward, new weights) and of a prediction."""
    torch.manual_seed(0)
    networks = [make_network() for _ in range(MEMBERS)]
    pixels = torch.randint(0, 256, (200, 3, SIZE, SIZE), dtype=torch.uint8)
    data = se.Data.from_arrays(pixels, torch.arange(200) % 10)
    feed = feed_for(data.train, data, IMAGES, torch.device("cpu"), augmentation="crop+flip")
    assert isinstance(feed, TableFeed)
    example = (torch.randn(4, 3, SIZE, SIZE),)
    (training,) = compile_networks(networks, example, True, True, sys.exit)
    (prediction,) = compile_predictions([network.eval() for network in networks], example, True, sys.exit)
    launches = Launches(dependent)
    with as_on_a_gpu(launches, shared_memory):
        stack = Stack(training.program, networks, training.shapes, training.bfloat16)
        stack.refresh()
        images, _ = BatchDrawer([feed], torch.bfloat16, channels_last=True).batch(IMAGES)
        x = images.repeat(MEMBERS, 1, 1, 1).contiguous(memory_format=torch.channels_last)
        run = Run(training.program, stack.weights, stack.learned, generators=None)
        run.backward(torch.zeros_like(run.forward([x])))
        stack = Stack(prediction.program, networks, prediction.shapes, prediction.bfloat16)
        Run(prediction.program, stack.weights, set(), generators=None).forward([x])
    return launches


if __name__ == "__main__":
    capability, shared_memory = map(int, sys.argv[1:])
    launches = record_launches(shared_memory, dependent=capability >= HOPPER)
    print(json.dumps(list(launches.compile_for(GPUTarget("cuda", capability, 32)))))

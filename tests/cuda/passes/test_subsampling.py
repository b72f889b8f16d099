"""The shortcut without parameters becomes one operation, and no other pooling or padding does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda.passes import fuse_subsampling
from tests.support.programs import Model, check_pass, conv, images, operations

Shortcut = Callable[[Tensor], Tensor]


def fused_operations(shortcut: Shortcut, size: int = 6) -> list[str]:
    network = Model(lambda self, x: shortcut(self.c(x)), c=conv())
    printed = check_pass(network, images(2, size=size), fuse_subsampling)
    return [line.split(" = ")[1] for line in printed.splitlines() if " = " in line][1:]


FUSED: dict[str, tuple[Shortcut, str]] = {
    "pool and pad": (lambda y: F.pad(F.avg_pool2d(y, 1, 2), (0, 0, 0, 0, 0, 3)), "subsample(conv2d, 2, 7)"),
    "module": (lambda y: F.pad(nn.AvgPool2d(1, 3)(y), (0, 0, 0, 0, 0, 1)), "subsample(conv2d, 3, 5)"),
    "pool alone": (lambda y: F.avg_pool2d(y, 1, 2), "subsample(conv2d, 2, 4)"),
    "no channels appended": (lambda y: F.pad(F.avg_pool2d(y, 1, 2), (0, 0, 0, 0, 0, 0)), "subsample(conv2d, 2, 4)"),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("size", [6, 7])
def test_a_shortcut_is_fused(name: str, size: int) -> None:
    shortcut, expected = FUSED[name]
    assert fused_operations(shortcut, size) == [expected]


LEFT: dict[str, tuple[Shortcut, list[str]]] = {
    "a wider window": (lambda y: F.avg_pool2d(y, 2, 2), ["avg_pool2d"]),
    "a window of one row": (lambda y: F.avg_pool2d(y, (1, 2), 2), ["avg_pool2d"]),
    "two strides": (lambda y: F.avg_pool2d(y, 1, (1, 2)), ["avg_pool2d"]),
    "rounded up": (lambda y: F.avg_pool2d(y, 1, 2, ceil_mode=True), ["avg_pool2d"]),
    "a maximum": (lambda y: F.max_pool2d(y, 1, 2), ["max_pool2d"]),
    "pad alone": (lambda y: F.pad(y, (0, 0, 0, 0, 0, 2)), ["pad"]),
    "channels in front": (lambda y: F.pad(F.avg_pool2d(y, 1, 2), (0, 0, 0, 0, 2, 2)), ["subsample", "pad"]),
    "pixels, too": (lambda y: F.pad(F.avg_pool2d(y, 1, 2), (1, 0, 0, 0, 0, 2)), ["subsample", "pad"]),
    "samples, too": (lambda y: F.pad(F.avg_pool2d(y, 1, 2), (0, 0, 0, 0, 0, 2, 0, 0)), ["subsample", "pad"]),
    "channels cut off": (lambda y: F.pad(F.avg_pool2d(y, 1, 2), (0, 0, 0, 0, 0, -2)), ["subsample", "pad"]),
    "not zeros": (lambda y: F.pad(F.avg_pool2d(y, 1, 2), (0, 0, 0, 0, 0, 2), value=1.0), ["subsample", "pad"]),
    "read twice": (
        lambda y: F.pad(z := F.avg_pool2d(y, 1, 2), (0, 0, 0, 0, 0, 2)).sum(1, keepdim=True) * z,
        ["subsample", "pad", "sum", "mul"],
    ),
    "images without channels": (lambda y: F.avg_pool2d(y.mean(1), 1, 2), ["mean", "avg_pool2d"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_poolings_and_paddings_stay(name: str) -> None:
    shortcut, left = LEFT[name]
    assert [operation.split("(")[0] for operation in fused_operations(shortcut)] == left


def test_a_stem_of_both_kinds() -> None:
    network = nn.Sequential(conv(), nn.AvgPool2d(1, 2), conv(4, 4), nn.AvgPool2d(2))
    printed = check_pass(network, torch.randn(2, 3, 8, 8), fuse_subsampling)
    assert operations(printed) == ["conv2d", "subsample", "conv2d", "avg_pool2d"]

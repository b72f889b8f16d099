"""A convolution and its norm become one operation, where nothing else needs the convolution's outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.cuda.passes import (
    collect_counters,
    fuse_convolutions,
    fuse_norms,
    remove_inplace,
    replace_layers,
)
from tests.support.programs import Model, check_pass, conv, images, norm, operations

BEFORE = (collect_counters, remove_inplace, replace_layers, fuse_norms)


def check(forward: Callable[..., Any], **parts: Any) -> str:
    network = Model(forward, **{"c": conv(), "n": norm(), "d": conv(4, 4), "m": norm(), **parts})
    return check_pass(network, images(3), fuse_convolutions, BEFORE)


def test_a_chain() -> None:
    printed = check(lambda self, x: self.m(self.d(self.n(self.c(x)).relu())), d=conv(4, 4, stride=2))
    assert operations(printed) == ["conv_norm", "conv_norm"]
    first, second = printed.splitlines()[1:3]
    assert "c.weight, n.weight, n.bias, n.running_mean, n.running_var, stride=1, padding=1" in first
    assert "relu=True" in first
    assert "stride=2" in second
    assert "relu" not in second


def test_a_residual_block() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.n(self.c(x)).relu()
        return (self.m(self.d(y)) + y).relu()

    printed = check(forward)
    assert operations(printed) == ["conv_norm", "conv_norm"]
    assert printed.count("relu=True") == 2


def test_two_branches_that_are_added() -> None:
    printed = check(lambda self, x: (self.n(self.c(x)) + self.m(self.d(self.e(x)))).relu(), e=conv())
    assert sorted(operations(printed)) == ["conv_norm", "conv_norm", "member_conv"]


LEFT: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "read twice": (lambda self, x: self.n(y := self.c(x)) * y, ["member_conv", "member_norm", "mul"]),
    "added to its own norm": (lambda self, x: (self.n(y := self.c(x)) + y).relu(), ["member_conv", "member_norm"]),
    "returned": (lambda self, x: torch.cat([self.n(y := self.c(x)), y], 1), ["member_conv", "member_norm", "cat"]),
    "two norms": (
        lambda self, x: self.n(y := self.c(x)).mul(2) + self.m(y),
        ["member_conv", "member_norm", "mul", "member_norm"],
    ),
    "something between": (lambda self, x: self.n(self.c(x).tanh()), ["member_conv", "tanh", "member_norm"]),
    "no convolution": (lambda self, x: self.m(self.n(self.e(x))), ["mul", "member_norm", "member_norm"]),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.scale


@pytest.mark.parametrize("name", LEFT)
def test_what_others_read_stays(name: str) -> None:
    forward, left = LEFT[name]
    assert [name for name in operations(check(forward, e=Scaled())) if name != "slice"] == left


def test_a_convolution_with_a_bias_stays() -> None:
    assert operations(check(lambda self, x: self.n(self.c(x)), c=conv(bias=True))) == ["member_conv", "member_norm"]


def test_a_grouped_convolution_stays() -> None:
    printed = check(lambda self, x: self.n(self.c(x)), c=conv(3, 3, groups=3), n=norm(3))
    assert operations(printed) == ["conv2d", "member_norm"]

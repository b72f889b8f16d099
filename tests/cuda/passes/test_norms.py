"""Batch norms take in the sum and the ReLU that follow them, and nothing that only looks like it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda.passes import collect_counters, fuse_norms, fuse_running_norms, remove_inplace
from tests.support.programs import Model, check_pass, check_prediction_pass, conv, images, norm, operations

Following = Callable[[Tensor, Tensor], Tensor]
BEFORE = (collect_counters, remove_inplace)


def in_place(y: Tensor, other: Tensor) -> Tensor:
    y += other
    return F.relu(y, inplace=True)


def seen_by_others(y: Tensor, other: Tensor) -> Tensor:
    result = y.relu_()
    return result * other + y


SUM, RELU, BOTH, NEITHER = (True, False), (False, True), (True, True), (False, False)

# What follows a norm's output y; what is fused (a sum, a ReLU); and the operations that are left.
CASES: dict[str, tuple[Following, tuple[bool, bool], list[str]]] = {
    "relu": (lambda y, other: F.relu(y), RELU, []),
    "module": (lambda y, other: nn.ReLU(inplace=True)(y), RELU, []),
    "method": (lambda y, other: y.add(other).relu(), BOTH, []),
    "sum": (lambda y, other: y + other, SUM, []),
    "the other way round": (lambda y, other: torch.relu(other + y), BOTH, []),
    "in place": (in_place, BOTH, []),
    "read by others, too": (seen_by_others, RELU, ["mul", "add"]),
    "read twice": (lambda y, other: F.relu(y) * y, NEITHER, ["relu", "mul"]),
    "two sums": (lambda y, other: F.relu(y + other + other), SUM, ["add", "relu"]),
    "a sum that is read twice": (lambda y, other: (z := y + other).relu() * z, SUM, ["relu", "mul"]),
    "with itself": (lambda y, other: F.relu(y + y), NEITHER, ["add", "relu"]),
    "a multiple of it": (lambda y, other: F.relu(torch.add(other, y, alpha=2)), NEITHER, ["add", "relu"]),
    "it and a multiple": (lambda y, other: F.relu(torch.add(y, other, alpha=2)), NEITHER, ["add", "relu"]),
    "into another": (lambda y, other: F.relu((other * 1).add_(y)), BOTH, ["mul"]),
    "broadcast": (lambda y, other: F.relu(y + other.mean((2, 3), keepdim=True)), NEITHER, ["mean", "add", "relu"]),
    "it is broadcast": (lambda y, other: y + other[:, None], NEITHER, ["unsqueeze", "add"]),
    "a number": (lambda y, other: F.relu(y + 1.0), NEITHER, ["add", "relu"]),
    "a difference": (lambda y, other: F.relu(y - other), NEITHER, ["sub", "relu"]),
    "another activation": (lambda y, other: F.silu(y + other), SUM, ["silu"]),
    "joined": (lambda y, other: torch.cat([y, other], 1).mean((2, 3)), NEITHER, ["cat", "mean"]),
    "detached": (lambda y, other: F.relu(y.detach()) * y + other, NEITHER, ["detach", "relu", "mul", "add"]),
}


def shown(printed: str) -> tuple[bool, bool]:
    """Tell what the norm of a printed program has taken in: a sum, a ReLU."""
    (line,) = (line for line in printed.splitlines() if "member_norm(" in line)
    return line.split("running_var, ")[1].startswith("momentum") is False, "relu=True" in line


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_norm_is_fused(name: str) -> None:
    following, fused, left = CASES[name]
    network = Model(lambda self, x: following(self.n(x), self.c(x)), n=norm(3), c=nn.Conv2d(3, 3, 1))
    printed = check_pass(network, images(3), fuse_norms, BEFORE)
    assert shown(printed) == fused
    assert [name for name in operations(printed) if name not in ("member_norm", "conv2d")] == left


class EvalNorm(nn.BatchNorm2d):
    """Stay in evaluation mode, as frozen norms do."""

    def train(self, mode: bool = True) -> "EvalNorm":
        return super().train(False)  # type: ignore[return-value]


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "in evaluation mode": partial(EvalNorm, 3),
    "without weights": partial(nn.BatchNorm2d, 3, affine=False),
    "without statistics": partial(nn.BatchNorm2d, 3, track_running_stats=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms_stay(name: str) -> None:
    layer = OTHERS[name]()
    if isinstance(layer, EvalNorm):
        layer.running_mean.uniform_()
        layer.running_var.uniform_(0.5, 2)
    network = Model(lambda self, x: self.n(self.c(x)).relu(), n=layer.train(), c=nn.Conv2d(3, 3, 1))
    assert operations(check_pass(network, images(3), fuse_norms, BEFORE)) == ["conv2d", "batch_norm", "relu"]


def test_norms_of_vectors_stay() -> None:
    network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU())
    assert operations(check_pass(network, torch.randn(3, 6), fuse_norms, BEFORE)) == ["linear", "batch_norm", "relu"]


def test_momentum_and_eps_are_kept() -> None:
    printed = check_pass(nn.Sequential(norm(3, momentum=0.3, eps=0.1)), images(3), fuse_norms, BEFORE)
    assert "momentum=0.3, eps=0.1" in printed


class Block(nn.Module):
    """Norms in a row, one whose result nobody reads, and a sum of two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(3) for _ in range(6))

    def forward(self, x: Tensor) -> Any:
        first = F.relu(self.norms[0](x))
        self.norms[2](first)
        second = F.relu(self.norms[1](first) + x)
        third = F.relu(self.norms[3](second))
        return F.relu(self.norms[4](third) + self.norms[5](second))


def test_a_block_of_norms() -> None:
    printed = check_pass(Block(), images(3), fuse_norms, BEFORE)
    assert operations(printed) == ["member_norm"] * 6  # also the one that only updates its statistics
    assert printed.count("relu=True") == 4


def running_norms(network: nn.Module, example: Tensor) -> list[str]:
    """Check `fuse_running_norms`; return the operations that are left."""
    return operations(check_prediction_pass(network, example, fuse_running_norms, (remove_inplace,)))


def test_norms_by_running_statistics_take_in_sum_and_relu() -> None:
    before = Model(lambda self, x: self.c(torch.relu(self.n(x) + x)), n=norm(3), c=conv())
    assert running_norms(before, images()) == ["running_norm", "conv2d"]
    assert running_norms(nn.Sequential(norm(3, affine=False), nn.ReLU(inplace=True)), images()) == ["running_norm"]


def test_norms_of_vectors_and_sequences_are_fused_in_prediction() -> None:
    layer = nn.BatchNorm1d(4)
    layer.running_mean += 1
    layer.running_var *= 3
    for shape in ((3, 4), (3, 4, 5)):
        assert running_norms(layer, torch.randn(shape)) == ["running_norm"]


def test_norms_without_running_statistics_stay_as_they_are() -> None:
    assert running_norms(nn.BatchNorm2d(3, track_running_stats=False), images()) == ["batch_norm"]

"""Compare a batch norm and what follows it, lazy and fused, with plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structured_ensembles.cuda.pending import Waiting
from torch import Tensor, nn

from structured_ensembles.cuda import batch_norm

Following = Callable[[Tensor, Tensor], Tensor]


def in_place(y: Tensor, other: Tensor) -> Tensor:
    y += other
    return F.relu(y, inplace=True)


def seen_by_others(y: Tensor, other: Tensor) -> Tensor:
    result = y.relu_()
    return result * other + y


def summed_in_place_and_seen(y: Tensor, other: Tensor) -> Tensor:
    result = y.add_(other)
    return torch.relu(result) + y


def stopped(y: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        mask = F.relu(y)
    return mask * y + other


def check(following: Following, device: str, dtype: torch.dtype = torch.float32) -> list[tuple[bool, bool]]:
    """The result and all derivatives are those of plain PyTorch; returns what joined: (a sum, a ReLU) per launch."""
    joined: list[tuple[bool, bool]] = []
    original = batch_norm.batch_norm

    def watched(x: Tensor, module: nn.BatchNorm2d, other: Tensor | None = None, relu: bool = False, **more: Any) -> Any:
        joined.append((other is not None, relu))
        return original(x, module, other, relu, **more)

    def computed(ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.BatchNorm2d(8).to(device)
        with torch.no_grad():
            module.weight.uniform_(0.5, 2)
            module.bias.normal_()
        x, other = (
            torch.randn(3, 8, 5, 6).to(device, dtype, memory_format=torch.channels_last).requires_grad_() for _ in "xo"
        )
        y = following(Waiting().add(x, module) if ours else module(x), other)
        slopes = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
        wanted = [x, other, module.weight, module.bias]
        derived = torch.autograd.grad((y * slopes).sum(), wanted, allow_unused=True, materialize_grads=True)
        assert module.running_mean is not None
        assert module.running_var is not None
        return [y * 1, *derived, module.running_mean, module.running_var]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_norm, "batch_norm", watched)
        found = computed(True)
    for one, expected in zip(found, computed(False), strict=True):
        assert type(one) is Tensor
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
    return joined


SUM, RELU, BOTH, NEITHER = (True, False), (False, True), (True, True), (False, False)

CASES: dict[str, tuple[Following, list[tuple[bool, bool]]]] = {
    "relu": (lambda y, other: F.relu(y), [RELU]),
    "module": (lambda y, other: nn.ReLU(inplace=True)(y), [RELU]),
    "method": (lambda y, other: y.add(other).relu(), [BOTH]),
    "sum": (lambda y, other: y + other, [SUM]),
    "the other way round": (lambda y, other: torch.relu(other + y), [BOTH]),
    "in place": (in_place, [BOTH]),
    "seen by others": (seen_by_others, [RELU]),
    "summed in place and seen": (summed_in_place_and_seen, [BOTH, SUM]),
    "twice": (lambda y, other: F.relu(y) * y, [RELU, NEITHER]),
    "two sums": (lambda y, other: F.relu(y + other + other), [SUM]),
    "with itself": (lambda y, other: F.relu(y + y), [NEITHER, BOTH]),
    "a multiple": (lambda y, other: F.relu(torch.add(other, y, alpha=2)), [NEITHER]),
    "by name": (lambda y, other: F.relu(torch.add(input=y, other=other)), [NEITHER]),
    "into another": (lambda y, other: F.relu((other * 1).add_(y)), [NEITHER]),
    "broadcast": (lambda y, other: F.relu(y + other.mean((2, 3), keepdim=True)), [NEITHER]),
    "a number": (lambda y, other: F.relu(y + 1.0), [NEITHER]),
    "something else": (lambda y, other: torch.cat([y, other]).mean((2, 3)), [NEITHER]),
    "sizes": (lambda y, other: F.relu(y).reshape(y.size(0), y.shape[1], y.shape[2:].numel()), [RELU]),
    "without gradients": (stopped, [NEITHER]),
    "an unlike layout": (lambda y, other: F.relu(y + other.contiguous()), [BOTH]),
}

"""What follows a batch normalisation becomes part of it, and nobody notices (by Triton's interpreter)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.training import batch_norm
from structured_ensembles.training.faster import faster
from structured_ensembles.training.pending import Normalisation, Pending, pending
from test_kernels import here

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


class Doubled(torch.autograd.Function):
    """Gets tensors as they are, and reads what it got in its own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * 2


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
        y = following(pending(Normalisation(x, module)) if ours else module(x), other)
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
    "a function of one's own": (
        lambda y, other: Doubled.apply(F.relu(y + other)) + Doubled.apply(y),
        [BOTH, NEITHER, NEITHER],
    ),
    "a function of a sum": (lambda y, other: Doubled.apply(y + other), [SUM, NEITHER]),
    "an unlike layout": (lambda y, other: F.relu(y + other.contiguous()), [BOTH]),
}


@here
@pytest.mark.parametrize("name", CASES)
def test_nobody_notices(name: str) -> None:
    following, joined = CASES[name]
    assert check(following, "cpu") == joined


def a_normalisation() -> tuple[Tensor, nn.BatchNorm2d]:
    return torch.randn(3, 8, 5, 6).to(memory_format=torch.channels_last), nn.BatchNorm2d(8)


@here
def test_numbers_that_are_none_get_through() -> None:
    x, module = a_normalisation()
    x[0, 0, 0, 0] = torch.nan
    assert F.relu(pending(Normalisation(x, module)))[:, 0].isnan().all()


@here
def test_what_changes_meanwhile_is_noticed() -> None:
    x, module = a_normalisation()
    result = pending(Normalisation(x, module))
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        F.relu(result)
    other = torch.zeros_like(x)
    result = pending(Normalisation(x, module)) + other
    other.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        F.relu(result)
    first = pending(Normalisation(x, module))
    second = first
    second += torch.zeros_like(x)
    with pytest.raises(RuntimeError, match="changed in place"):
        Doubled.apply(first).sum().backward()


def test_nothing_but_python_gets_hold_of_it() -> None:
    """Better an error than the memory of something else."""
    scripted = torch.jit.trace(torch.exp, torch.ones(3, 8, 5, 6))
    result = pending(Normalisation(*a_normalisation()))
    with pytest.raises(RuntimeError, match="failed in the TorchScript interpreter"):
        scripted(result)
    assert isinstance(result, Pending)


class Residual(nn.Module):
    """A block, and a normalisation whose result is for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norms[0](x))
        self.norms[2](first)
        return F.relu(self.norms[1](first) + x)


@here
def test_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "fits", lambda x: True)
    x, _ = a_normalisation()
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        network = Residual().train()
        with faster(list(network.norms) if ours else [], waiting=[]):
            y = network(x)
        found.append([y, *network.state_dict().values()])
    for one, expected in zip(*found, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


@here
def test_one_normalisation_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[bool] = []
    original = batch_norm.batch_norm

    def watched(*given: Any, **named: Any) -> Tensor:
        again.append(named["again"])
        return original(*given, **named)

    monkeypatch.setattr(batch_norm, "batch_norm", watched)
    monkeypatch.setattr(batch_norm, "fits", lambda x: True)
    torch.manual_seed(0)
    x, first = a_normalisation()
    network = nn.Sequential(first, nn.BatchNorm2d(8))
    slopes = torch.randn_like(x)
    found = []
    for ours in (True, False):
        with faster(list(network) if ours else [], waiting=[]):
            y = F.relu(network(x))
        found.append(torch.autograd.grad(y, list(network.parameters()), slopes))
    for one, expected in zip(*found, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-4)
    assert again == [False, False]  # a tensor that is pending would be normalised once more to go back

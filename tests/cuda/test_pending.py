"""What follows a batch normalisation becomes part of it, and nobody notices (by Triton's interpreter)."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from structured_ensembles.cuda.faster import faster, hooked
from structured_ensembles.cuda.pending import Pending, Waiting
from torch import Tensor, nn

from structured_ensembles.cuda import batch_norm, convolution
from tests.support.fused_norms import (
    CASES,
    check,
)
from tests.support.kernel_checks import here


@here
@pytest.mark.parametrize("name", CASES)
def test_nobody_notices(name: str) -> None:
    following, joined = CASES[name]
    assert check(following, "cpu") == joined


def a_normalisation() -> tuple[Tensor, nn.BatchNorm2d]:
    return torch.randn(3, 8, 5, 6).to(memory_format=torch.channels_last), nn.BatchNorm2d(8)


def example() -> tuple[Tensor, nn.BatchNorm2d]:
    torch.manual_seed(0)
    return torch.randn(3, 8, 5, 6).to(memory_format=torch.channels_last), nn.BatchNorm2d(8)


@here
def test_numbers_that_are_none_get_through() -> None:
    x, module = example()
    x[0, 0, 0, 0] = torch.nan
    assert F.relu(Waiting().add(x, module))[:, 0].isnan().all()


CHANGES: dict[str, Callable[[Tensor, nn.BatchNorm2d], object]] = {
    "the image": lambda x, module: x.add_(1),
    "a weight": lambda x, module: module.weight.detach().add_(1),
    "another weight": lambda x, module: setattr(module, "weight", nn.Parameter(torch.ones(8))),
    "what is learned": lambda x, module: module.bias.requires_grad_(False),
    "the momentum": lambda x, module: setattr(module, "momentum", 0.5),
    "the statistics": lambda x, module: module._buffers.update(running_mean=torch.zeros(8)),
}


@here
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_meanwhile_is_noticed(name: str) -> None:
    x, module = example()
    result = Waiting().add(x, module)
    CHANGES[name](x, module)
    with pytest.raises(RuntimeError, match="changed meanwhile"):
        F.relu(result)


@here
def test_a_sum_that_changes_meanwhile_is_noticed() -> None:
    x, module = example()
    other = torch.zeros_like(x)
    result = Waiting().add(x, module) + other
    other.add_(1)
    with pytest.raises(RuntimeError, match="changed meanwhile"):
        F.relu(result)


class Doubled(torch.autograd.Function):
    """Gets tensors as they are, and reads what it got in its own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * 2


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.BatchNorm2d) -> Tensor:
        return Waiting().add(x, module)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * 2


@here
def test_no_derivative_gets_lost() -> None:
    x, module = example()
    taken = Doubled.apply(Waiting().add(x, module))
    torch.testing.assert_close(taken, 2 * module(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="has taken what was pending"):
        taken.sum().backward()
    with pytest.raises(RuntimeError, match="given back what is still pending"):
        F.relu(Normalised.apply(x.requires_grad_(), module))
    with pytest.raises((RuntimeError, SystemError)):  # torch itself stumbles over it
        F.relu(InPlace.apply(Waiting().add(x, module)))
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        Waiting().add(x, module).register_hook(print)


def test_nothing_but_python_gets_hold_of_it() -> None:
    """Better an error than the memory of something else."""
    scripted = torch.jit.trace(torch.exp, torch.ones(3, 8, 5, 6))
    result = Waiting().add(*example())
    with pytest.raises(RuntimeError, match="failed in the TorchScript interpreter"):
        scripted(result)
    assert isinstance(result, Pending)


class Residual(nn.Module):
    """A block, a normalisation whose result is for nobody, one of another's result, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norms[0](x))
        self.norms[2](first)
        second = F.relu(self.norms[1](first) + x)
        third = F.relu(self.norms[3](input=self.norms[1](second)))
        return F.relu(self.norms[4](third) + self.norms[4](second))


@here
def test_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "fits", lambda x: True)
    x, _ = example()
    slopes, found = torch.randn_like(x), []
    for ours in (True, False):
        torch.manual_seed(0)
        network = Residual().train()
        waiting = Waiting()
        with faster(list(network.norms) if ours else [], waiting=waiting):
            y = network(x)
        assert waiting.used == ours
        slopes_of = torch.autograd.grad(
            y, list(network.parameters()), slopes, allow_unused=True, materialize_grads=True
        )
        found.append([y, *slopes_of, *network.state_dict().values()])
    for one, expected in zip(*found, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-4)


@here
def test_what_is_done_is_not_kept() -> None:
    x, module = example()
    waiting = Waiting()
    with torch.no_grad():
        F.relu(waiting.add(x.clone(), module))
        seen = weakref.ref(waiting._open[0])
        waiting.add(x, nn.BatchNorm2d(8))
    assert seen() is None


def test_hooks_of_all_modules_count_too() -> None:
    network = nn.Sequential(nn.BatchNorm2d(8))
    assert not hooked(network)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert hooked(network)
    finally:
        handle.remove()
    network[0].register_forward_hook(lambda module, inputs, output: None)
    assert hooked(network)


@here
def test_second_derivatives_are_an_error() -> None:
    """Better than none without a word."""
    x, module = example()
    y = batch_norm.batch_norm(x.requires_grad_(), module)
    weight = torch.randn(8, 8, 3, 3).to(torch.float16, memory_format=torch.channels_last).requires_grad_()
    outputs = convolution._Convolution.apply(x.detach().half().requires_grad_(), weight, 1, 1)
    for result, source in ((y, x), (outputs, weight)):
        derivative = torch.autograd.grad(result.float().square().sum(), source, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="once_differentiable"):
            derivative.sum().backward()

"""A program of several members computes each of them as a program of one does, or is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda.compilation import compile_network
from structured_ensembles.cuda.passes import replace_layers, stack_members
from structured_ensembles.cuda.program import ProgramError
from tests.support.programs import (
    Model,
    assert_equal,
    conv,
    images,
    norm,
    operations,
    results_of,
    results_of_network,
    rewritten,
)


def members(make: Callable[[], nn.Module], count: int = 3) -> list[nn.Module]:
    networks = []
    for seed in range(count):
        torch.manual_seed(seed)
        networks.append(make())
    return networks


def check_stacked(networks: list[nn.Module], *examples: Any) -> None:
    """Three members in one program are three networks on their own, each with a batch of its own."""
    program = compile_network(networks[0], examples[0])
    stacked = stack_members(program, len(networks))
    assert str(stacked).startswith(f"program of {len(networks)} members\n")
    assert str(stacked).splitlines()[1:] == str(program).splitlines()[1:]
    actual = results_of(stacked, networks, examples)
    for network, example, results in zip(networks, examples, actual, strict=True):
        assert_equal(results, results_of(program, [network], [example])[0])
        assert_equal(results, results_of_network(network, example, program.counters))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv(), conv(4, 8, stride=2), conv(8, 8)
        self.norms = nn.ModuleList([norm(4), norm(8), norm(8)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.norms[0](self.stem(x)).relu()
        y = self.norms[1](self.first(x)).relu()
        shortcut = F.pad(F.avg_pool2d(x, 1, 2), (0, 0, 0, 0, 0, 4))
        y = (self.norms[2](self.second(y)) + shortcut).relu()
        return self.head(y.mean((2, 3)))


def test_three_residual_networks() -> None:
    check_stacked(members(Residual), *(images(4, seed=seed) for seed in range(3)))


# Operations between layers that compute sample by sample, on (batch, 4, 6, 6).
ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "activations": lambda y: F.gelu(y) + F.silu(y) - F.elu(y) * torch.sigmoid(y) / (1 + y.abs()),
    "poolings": lambda y: F.max_pool2d(y, 2) + F.avg_pool2d(y, 2) + F.adaptive_avg_pool2d(y, 3),
    "flattened": lambda y: y.flatten(1),
    "viewed": lambda y: y.view(y.shape[0], 2, -1).transpose(1, 2),
    "channels joined": lambda y: torch.cat([y, y * 2], 1),
    "channels cut": lambda y: y.chunk(2, 1)[0] * y[:, 2:] + y.split(2, dim=1)[1],
    "mean of pixels": lambda y: y - y.mean((2, 3), keepdim=True),
    "softmax of channels": lambda y: F.softmax(y, 1) + F.log_softmax(y, -1),
    "a channel": lambda y: y.select(1, 2).unsqueeze(1).squeeze(1),
    "padded": lambda y: F.pad(y, (1, 1, 0, 2)),
    "resized": lambda y: F.interpolate(y, scale_factor=2, mode="nearest"),
    "maximum": lambda y: y.amax((2, 3)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_operations_on_samples_are_stacked(name: str) -> None:
    networks = members(lambda: Model(lambda self, x: ALLOWED[name](self.c(x)), c=conv(bias=True)), 2)
    check_stacked(networks, images(4), images(4, seed=1))


def test_several_inputs() -> None:
    def make() -> nn.Module:
        return Model(lambda self, a, b: self.a(a) * self.b(b), a=nn.Linear(6, 4), b=nn.Linear(3, 4))

    check_stacked(members(make, 2), *((torch.randn(3, 6), torch.randn(3, 3)) for _ in range(2)))


def other_batch_first(y: Tensor) -> Tensor:
    moved = y.flatten(1).transpose(0, 1)
    return (moved * 2).transpose(0, 1)


# Operations that mix samples, or use what members differ in, and what the error says.
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "mean of the batch": (lambda self, y: y - y.mean(0), "mean.dim works on the batch dimension"),
    "mean of everything": (lambda self, y: y - y.mean(), "mean.default is not known to compute sample by sample"),
    "flattened": (lambda self, y: y * y.flatten().sum(), "flatten.using_ints works on the batch dimension"),
    "joined": (lambda self, y: torch.cat([y, y]), "cat.default works on the batch dimension"),
    "softmax of the batch": (lambda self, y: F.softmax(y, 0), "softmax.int works on the batch dimension"),
    "softmax of the batch, from behind": (lambda self, y: F.softmax(y, -4), "softmax.int works on the batch"),
    "batch moved": (lambda self, y: other_batch_first(y), "transpose.int works on the batch dimension"),
    "batch turned around": (lambda self, y: y.flip(0), "flip.default is not known"),
    "samples merged": (lambda self, y: y.view(-1, 6), "reshape.default changes the batch dimension"),
    "a new first dimension": (lambda self, y: y.unsqueeze(0), "unsqueeze.default works on the batch dimension"),
    "batch padded": (lambda self, y: F.pad(y, (0, 0, 0, 0, 0, 0, 1, 0)), "pad.default works on the batch dimension"),
    "a sum over everything": (lambda self, y: y * y.sum((0, 1, 2, 3)), "sum.dim_IntList works on the batch"),
    "a parameter": (lambda self, y: y * self.scale, "mul.Tensor uses 'scale', which members differ in"),
    "a buffer": (lambda self, y: y + self.shift, "add.Tensor uses 'shift', which members differ in"),
    "another norm": (lambda self, y: self.other(y), "batch_norm.default uses 'other.running_mean'"),
    "a group norm": (lambda self, y: self.group(y), "group_norm.default uses 'group.weight'"),
    "a grouped convolution": (lambda self, y: self.grouped(y), "conv2d.default uses 'grouped.weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_samples_or_members_is_refused(name: str) -> None:
    forward, message = REFUSED[name]
    network = Model(
        lambda self, x: forward(self, self.c(x)), c=conv(), scale=nn.Parameter(torch.ones(4, 1, 1)),
        shift=torch.ones(4, 1, 1), other=nn.BatchNorm2d(4, affine=False), group=nn.GroupNorm(2, 4),
        grouped=conv(4, 4, groups=2),
    )  # fmt: skip
    program = compile_network(network, images(4))
    with pytest.raises(ProgramError, match=message.replace(".", r"\.")):
        stack_members(program, 3)
    assert stack_members(program, 1) is program  # one member may do as it likes


def test_layers_without_the_member_axis_are_refused() -> None:
    """The passes before have not run: weights would be those of the first member."""
    program = rewritten(nn.Sequential(conv()), images())
    with pytest.raises(ProgramError, match=r"conv2d.default uses '0.weight', which members differ in"):
        stack_members(program, 2)
    assert operations(str(stack_members(replace_layers(program), 2))) == ["member_conv"]


def test_an_output_without_the_batch_is_refused() -> None:
    with pytest.raises(ProgramError):
        stack_members(compile_network(Model(lambda self, x: self.c(x).sum(0), c=conv()), images()), 2)


def test_a_constant_of_the_code_is_refused() -> None:
    network = Model(lambda self, x: self.c(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None], c=conv())
    with pytest.raises(ProgramError, match="lifted_tensor"):
        stack_members(compile_network(network, images()), 2)

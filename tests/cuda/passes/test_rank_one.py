"""Members that share weights but for rank-one factors: as a program, against networks whose hooks apply the factors."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.cuda.compilation import compile_networks, compile_rank_one
from structured_ensembles.cuda.program import ProgramError
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.layers import find_called_layers
from tests.support.kernel_checks import here, recorded_launches
from tests.support.programs import (
    Model,
    assert_equal,
    conv,
    images,
    norm,
    operations,
    output_gradient,
    results_of,
    results_of_network,
)


def rank_one(model: nn.Module, members: int = 3, example: Any = None, repeat: Any = "tile") -> BatchEnsembleNetwork:
    """Make a network of members whose factors are no longer -1 and 1."""
    layers = find_called_layers(model, images() if example is None else example).all
    network = BatchEnsembleNetwork(model, layers, members, repeat)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(("factors", "biases")):
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    return network


def check(network: BatchEnsembleNetwork, example: Any = None) -> list[str]:
    """Outputs, gradients and statistics are those of the network; returns the operations of the program."""
    example = images(4) if example is None else example
    assert network.rank_one is not None
    program = compile_rank_one(network.rank_one, example)
    (actual,) = results_of(program, [network], [example])
    assert_equal(actual, results_of_network(network, example, program.counters))
    return operations(str(program))


def small() -> nn.Module:
    torch.manual_seed(0)
    layers: Sequence[nn.Module] = [
        conv(3, 4, bias=True),
        norm(),
        nn.ReLU(),
        conv(4, 5),
        nn.Flatten(),
        nn.Linear(180, 3),
    ]
    return nn.Sequential(*layers)


def test_factors_and_biases_of_convolutions_and_linear_layers() -> None:
    names = check(rank_one(small()))
    assert names == [
        *["rank_one_weights"] * 3, "repeat_members", "member_conv", "add_member_bias", "member_norm", "member_conv",
        "flatten", "member_linear", "add_member_bias", "split_members",
    ]  # fmt: skip


def test_sequences_and_several_inputs() -> None:
    def forward(self: Model, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x).mean(1) * self.b(y)

    model = Model(forward, a=nn.Linear(5, 4), b=nn.Linear(2, 4))
    inputs = torch.randn(3, 7, 5), torch.randn(3, 2)
    assert check(rank_one(model, example=inputs), inputs).count("repeat_members") == 2


def test_a_layer_that_is_called_twice_has_the_sum_of_both_gradients() -> None:
    check(rank_one(Model(lambda self, x: self.c(self.c(x).relu()) + self.c(x), c=conv(3, 3, bias=True))))


def test_frozen_weights_and_factors_have_no_gradients() -> None:
    for frozen in ("weight", "input_factors", "output_factors"):
        network = rank_one(small())
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(frozen not in name)
        check(network)


def test_a_size_that_the_network_reads_is_that_of_all_members() -> None:
    check(rank_one(Model(lambda self, x: self.c(x).view(x.size(0), -1) / x.size(0), c=conv())))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()),
        Model(lambda self, x: self.c(x) * self.c.weight.sum(), c=conv(4, 4)),
    ],
)
def test_layers_whose_factors_a_program_cannot_have_are_refused(model: nn.Module) -> None:
    network = rank_one(model, example=images(2, 4))
    assert network.rank_one is not None
    with pytest.raises(ProgramError, match="not a layer whose factors"):
        compile_rank_one(network.rank_one, images(2, 4))


def test_split_rows_run_as_they_are() -> None:
    told: list[str] = []
    assert compile_networks([rank_one(small(), repeat="split")], images(), False, True, told.append) == []
    assert "PyTorch's own kernels are used" in told[0]


def test_weights_are_cast_and_factors_are_not() -> None:
    network = rank_one(small())
    (one,) = compile_networks([network], images(), True, True, pytest.fail)
    assert {one.program.names[placeholder] for placeholder in one.bfloat16} == {
        f"network.{layer}.weight" for layer in (0, 3, 5)
    }


@here
def test_our_kernels_compute_what_the_network_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.cuda import batch_norm, convolution

    monkeypatch.setattr(convolution, "fits", lambda x, weight, window: True)
    monkeypatch.setattr(batch_norm, "fits", lambda x, members: x.dim() == 4)

    def forward(self: Model, x: Tensor) -> Any:
        y = self.n(self.a(x)).relu()
        return self.line((self.m(self.b(y)) + y).relu().mean((2, 3)))

    torch.manual_seed(0)
    model = Model(forward, a=conv(3, 6), b=conv(6, 6), n=norm(6), m=norm(6), line=nn.Linear(6, 4))
    network = rank_one(model, members=2)
    expected = results_of_network(network, images(3))
    assert network.rank_one is not None
    program = compile_rank_one(network.rank_one, images())
    stack = Stack(program, [network], {})
    run = Run(program, stack.weights, stack.learned, None)
    with recorded_launches() as names:
        outputs = run.forward([images(3)])
        stack.set_gradients(run.backward(output_gradient(outputs)))
    assert names.count("convolve_by_sweep") == 3  # forward, and back to the input of the second
    assert names.count("normalize") == 2
    torch.testing.assert_close(outputs.double(), expected["output"], rtol=1e-4, atol=1e-4)
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        wanted = expected[f"{name}.grad"]
        scale = float(wanted.abs().max())
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-3, atol=1e-4 * scale)

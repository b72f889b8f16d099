"""Layers whose outputs members scale: as a program, against a network whose hooks scale them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import call
from structured_ensembles.common.member_rows import scale_rows
from structured_ensembles.cuda import batch_norm, convolution
from structured_ensembles.cuda.compilation import compile_scaled
from structured_ensembles.cuda.program import Program, ProgramError
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack
from structured_ensembles.networks.copying import clone_model
from tests.support.kernel_checks import here, recorded_launches
from tests.support.programs import (
    Model,
    Results,
    assert_equal,
    conv,
    images,
    in_float64,
    norm,
    operations,
    output_gradient,
)

Factors = Mapping[str, Tensor]


def frozen(network: nn.Module) -> nn.Module:
    return network.requires_grad_(requires_grad=False)


def draw(channels: Mapping[str, int], members: int = 3) -> dict[str, Tensor]:
    """Draw factors (members, channels) of layers, some of them negative."""
    generator = torch.Generator().manual_seed(5)
    return {layer: torch.randn(members, count, generator=generator).double() for layer, count in channels.items()}


def results_of_program(program: Program, network: nn.Module, x: Any, factors: Factors) -> Results:
    copy = clone_model(network).double().train()
    stack = Stack(program, [copy], {})
    by_placeholder = {placeholder: factors[layer] for placeholder, layer in program.factors.items()}
    run = Run(program, {**stack.weights, **by_placeholder}, set(by_placeholder), generators=None)
    outputs = run.forward([in_float64(x)])
    gradients = run.backward(output_gradient(outputs))
    stack.store_statistics()
    named = {program.factors[placeholder]: gradient for placeholder, gradient in gradients.items()}
    return {"output": outputs, **named, **buffers_of(copy, program)}


def results_of_hooks(
    program: Program, network: nn.Module, x: Any, factors: Factors, dims: Mapping[str, int]
) -> Results:
    copy = clone_model(network).double().train()
    leaves = {layer: factor.clone().requires_grad_() for layer, factor in factors.items()}
    for layer, dim in dims.items():

        def scale(_layer: nn.Module, _inputs: Any, y: Tensor, factor: Tensor = leaves[layer], dim: int = dim) -> Tensor:
            return scale_rows(y, factor, dim)

        copy.get_submodule(layer).register_forward_hook(scale)
    outputs = call(copy, in_float64(x))
    outputs.backward(output_gradient(outputs))
    gradients = {layer: leaf.grad for layer, leaf in leaves.items() if leaf.grad is not None}
    return {"output": outputs.detach(), **gradients, **buffers_of(copy, program)}


def buffers_of(network: nn.Module, program: Program) -> Results:
    return {name: buffer for name, buffer in network.named_buffers() if name not in program.counters}


def check(network: nn.Module, channels: Mapping[str, int], dims: Mapping[str, int], x: Any) -> list[str]:
    """Outputs, gradients of the factors and statistics are those of the hooks; returns the program's operations."""
    network = frozen(network)
    program = compile_scaled(network, dims, x)
    factors = draw(channels)
    assert_equal(results_of_program(program, network, x, factors), results_of_hooks(program, network, x, factors, dims))
    return operations(str(program))


def block() -> nn.Module:
    """A block of a residual network; the outputs of its first convolution are scaled."""

    def forward(self: Model, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.m(self.b(self.n(self.a(x)).relu()))
        return self.line((y + x).relu().mean((2, 3)))

    torch.manual_seed(0)
    layers = {"first": conv(3, 4), "a": conv(4, 6), "n": norm(6), "b": conv(6, 4), "m": norm()}
    return Model(forward, **layers, line=nn.Linear(4, 3))


def test_a_convolution_before_a_norm() -> None:
    names = check(block(), {"a": 6}, {"a": -3}, images(6))
    assert names == [
        "member_conv", "scaled_conv", "member_norm", "conv_norm", "mean", "member_linear",
    ]  # fmt: skip


def test_norms_see_the_rows_of_all_members() -> None:
    network = frozen(block())
    program = compile_scaled(network, {"a": -3}, images())
    results = results_of_program(program, network, images(6), draw({"a": 6}))
    a, n = network.a, network.n  # type: ignore[union-attr]
    with torch.no_grad():
        y = a.double()(network.first.double()(images(6).double()))  # type: ignore[union-attr, operator]
    scaled = y.unflatten(0, (3, 2)) * draw({"a": 6})["a"][:, None, :, None, None]
    mean = scaled.flatten(0, 1).mean((0, 2, 3))
    torch.testing.assert_close(results["n.running_mean"], 0.9 * n.running_mean.double() + 0.1 * mean)  # type: ignore[union-attr, operator]


def test_a_bias_is_scaled_too() -> None:
    network = nn.Sequential(conv(3, 4, bias=True), nn.ReLU(), conv(4, 5, bias=True), nn.Flatten(), nn.Linear(180, 3))
    check(network, {"0": 4, "2": 5}, {"0": -3, "2": -3}, images(6))


def test_linear_layers_and_sequences() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu().mean(1))

    names = check(
        Model(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 6), c=nn.Linear(6, 2)),
        {"a": 4, "b": 6},
        {"a": -1, "b": -1},
        torch.randn(6, 7, 5),
    )
    assert names.count("scale_rows") == 2


def test_outputs_of_norms_and_of_grouped_convolutions() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.n(self.b(self.a(x))).relu().flatten(1)

    network = Model(forward, a=conv(3, 4), b=conv(4, 4, groups=2), n=norm())
    names = check(network, {"b": 4, "n": 4}, {"b": -3, "n": -3}, images(6))
    assert names.count("scale_rows") == 2


def test_a_layer_that_is_called_twice_is_scaled_twice() -> None:
    network = Model(lambda self, x: (self.c(self.c(x).relu()) + self.c(x)).flatten(1), c=conv(3, 3, bias=True))
    check(network, {"c": 3}, {"c": -3}, images(6))


def test_an_output_with_another_reader_is_scaled_for_it_too() -> None:
    network = Model(lambda self, x: (self.n(self.a(x)).relu() + x.mean(1, keepdim=True)).flatten(1), a=conv(), n=norm())
    check(network, {"a": 4}, {"a": -3}, images(6))


def test_what_has_no_weight_of_its_own_is_refused() -> None:
    network = frozen(nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(108, 2)))
    with pytest.raises(ProgramError, match="'0' has no weight of its own"):
        compile_scaled(network, {"0": -3}, images())


def test_random_numbers_other_than_those_of_dropout_are_refused() -> None:
    network = frozen(nn.Sequential(conv(), nn.RReLU(), nn.Flatten()))
    with pytest.raises(ProgramError, match="draws random numbers"):
        compile_scaled(network, {"0": -3}, images())


def test_print_shows_whose_factors_they_are() -> None:
    assert "scaled_conv(member_conv, a.weight, None, factors of a, padding=1)" in str(
        compile_scaled(frozen(block()), {"a": -3}, images())
    ).replace("stride=1, ", "")


@here
@pytest.mark.parametrize("bias", [False, True])
def test_our_kernels_compute_what_the_network_does(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(convolution, "fits", lambda x, weight, window: True)
    monkeypatch.setattr(batch_norm, "fits", lambda x, members: x.dim() == 4)
    network = frozen(block())
    if bias:
        network.a = conv(4, 6, bias=True).requires_grad_(requires_grad=False)
    factors = draw({"a": 6}, members=2)
    program = compile_scaled(network, {"a": -3}, images())
    expected = results_of_hooks(program, network, images(6), factors, {"a": -3})
    stack = Stack(program, [network], {})
    by_placeholder = {placeholder: factors[layer].float() for placeholder, layer in program.factors.items()}
    run = Run(program, {**stack.weights, **by_placeholder}, set(by_placeholder), generators=None)
    with recorded_launches() as names:
        outputs = run.forward([images(6)])
        (gradient,) = run.backward(output_gradient(outputs)).values()
    assert names.count("convolve_by_sweep") == 4  # forward, and back to the input of the last
    assert names.count("normalize") == 2
    torch.testing.assert_close(outputs.double(), expected["output"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        gradient.double(), expected["a"], rtol=1e-3, atol=1e-4 * float(expected["a"].abs().max())
    )
    for placeholder, name in program.names.items():
        if "running" in name:
            torch.testing.assert_close(stack.weights[placeholder][0].double(), expected[name], rtol=1e-4, atol=1e-4)

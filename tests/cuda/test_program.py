"""Networks are exported to programs that can be printed, for batches of any size; errors say what is in the way."""

import io
import logging
import random
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.cuda.compilation import compile_network
from structured_ensembles.cuda.program import ProgramError, export_program, shape_of
from tests.support.programs import Model, assert_equal, conv, images, norm, operations, results_of, results_of_network


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = conv(), norm(), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def test_a_program_prints_what_is_fused() -> None:
    assert str(compile_network(Small(), images())) == (
        "program of 1 member\n"
        "  conv_norm = conv_norm(x, conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var, "
        "stride=1, padding=1, momentum=0.1, eps=1e-05, relu=True)\n"
        "  mean = mean(conv_norm, [2, 3])\n"
        "  member_linear = member_linear(mean, head.weight, head.bias)\n"
        "  return member_linear"
    )


def test_a_program_runs_on_batches_of_any_size() -> None:
    network = Small()
    program = compile_network(network, images(2))
    for samples in (2, 3, 7):
        example = images(samples)
        assert_equal(
            results_of(program, [network], [example])[0], results_of_network(network, example, program.counters)
        )


def test_names_and_shapes() -> None:
    program = export_program(Small(), images())
    assert program.inputs == ("x",)
    assert set(program.names.values()) == set(Small().state_dict())
    assert shape_of(program.output)[1:] == (5,)
    assert not isinstance(shape_of(program.output)[0], int)  # the batch


def test_export_leaves_the_network_and_the_example_alone() -> None:
    network = Small().eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    x = images()
    export_program(network, x)
    assert not network.training
    assert torch.equal(x, images())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("name", ["input", "x", "len", "args", "weight"])
def test_inputs_of_any_name(name: str) -> None:
    """Python's own names are not kept in a copy of a graph: `nn.Sequential` calls its input `input`."""
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {name}): return self.layer({name})", scope)
    network = type("Named", (nn.Module,), {"forward": scope["forward"]})()
    network.layer = nn.Linear(6, 4)
    x = torch.randn(2, 6)
    assert_equal(results_of(compile_network(network, x), [network], [x])[0], results_of_network(network, x))


def difference(self: Any, image: Tensor, mask: Tensor) -> Any:
    return self.a(image) - 2 * self.b(mask)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, image: Tensor, mask: Tensor) -> Any:
        return difference(self, image, mask)


@pytest.mark.parametrize("order", [("image", "mask"), ("mask", "image")])
def test_inputs_by_name_in_any_order(order: tuple[str, str]) -> None:
    network, inputs = TwoInputs(), {name: torch.randn(2, 6) for name in order}
    assert_equal(
        results_of(compile_network(network, inputs), [network], [inputs])[0], results_of_network(network, inputs)
    )


def test_one_tensor_given_for_two_inputs_is_two_inputs() -> None:
    network, x = TwoInputs(), torch.randn(2, 6)
    program = compile_network(network, (x, x))
    inputs = (torch.randn(2, 6), torch.randn(2, 6))
    assert_equal(results_of(program, [network], [inputs])[0], results_of_network(network, inputs))


def test_inputs_of_a_variable_number() -> None:
    network = Model(difference, a=nn.Linear(6, 4), b=nn.Linear(6, 4))  # forward(self, *inputs, **named)
    inputs = (torch.randn(2, 6), torch.randn(2, 6))
    assert_equal(
        results_of(compile_network(network, inputs), [network], [inputs])[0], results_of_network(network, inputs)
    )


def test_conversions_assert_no_type() -> None:
    """A program is exported in float32, and runs in float64 and under autocast, too."""
    network = Model(lambda self, x: self.layer(x) * (x > 0).float(), layer=nn.Linear(6, 6))
    x = torch.randn(2, 6)
    program = export_program(network, x)
    assert not [name for name in operations(str(program)) if "assert" in name]
    results_of(program, [network], [x])


@torch.no_grad()
def stopped(self: Any, x: Tensor) -> Any:
    return self.c(x)


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "two outputs": (lambda self, x: (self.c(x), x), "the network returns more than one tensor"),
    "no tensor": (lambda self, x: 3, "the network returns something that is not a tensor"),
    "a dictionary": (lambda self, x: {"a": self.c(x), "b": x}, "the network returns more than one tensor"),
    "control flow on data": (
        lambda self, x: self.c(x) if x.sum() > 0 else x,
        "the network cannot be exported: Could not guard on data-dependent expression",
    ),
    "a fixed batch": (lambda self, x: self.c(x).view(2, -1), "the network cannot be exported"),
    "an error of its own": (lambda self, x: self.missing(x), "the network cannot be exported: .*missing"),
    "without gradients": (stopped, "the exported network has a node of kind get_attr"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_says_why_a_network_has_no_program(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    forward, message = ERRORS[name]
    with pytest.raises(ProgramError, match=message):
        export_program(Model(forward, c=conv()), images())
    assert capfd.readouterr() == ("", "")  # torch.export would print graphs and tracebacks


def test_the_log_of_torch_is_as_it_was() -> None:
    before = logging.getLogger("torch").level
    with redirect_stderr(io.StringIO()), pytest.raises(ProgramError):
        export_program(Model(lambda self, x: self.c(x) if x.sum() > 0 else x, c=conv()), images())
    assert logging.getLogger("torch").level == before


def test_random_numbers_of_the_host_become_constants_of_the_graph() -> None:
    """So that a program must be tried before it is used, see test_compilation.py."""
    program = export_program(Model(lambda self, x: self.c(x) * random.random(), c=conv()), images())
    assert operations(str(program)) == ["conv2d", "mul"]

"""Run programs in float64 and compare them, with each other and with the networks that they were made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import call, clone_inputs, map_inputs, tensors_in
from structured_ensembles.cuda.channel_padding import Shapes
from structured_ensembles.cuda.program import Pass, Program, export_program
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack, unpadded
from structured_ensembles.networks.copying import clone_model

Results = dict[str, Tensor]


class Model(nn.Module):
    """A network whose forward pass is a function of the network and its inputs; layers and buffers by name."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, value in parts.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.function(self, *inputs, **named)


def conv(inputs: int = 3, outputs: int = 4, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, **{"padding": 1, "bias": False, **options})


def norm(channels: int = 4, **options: Any) -> nn.BatchNorm2d:
    """Make a batch norm whose weights and statistics differ from zero and one."""
    layer = nn.BatchNorm2d(channels, **options)
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            if tensor is not None:
                tensor.uniform_(0.5, 2)
    return layer


def images(samples: int = 2, channels: int = 3, size: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, channels, size, size, generator=generator)


def in_float64(inputs: Any) -> Any:
    return map_inputs(lambda x: x.double() if x.is_floating_point() else x, clone_inputs(inputs))


def output_gradient(outputs: Tensor) -> Tensor:
    return torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)


def results_of(
    program: Program, networks: Sequence[nn.Module], inputs: Sequence[Any], shapes: Shapes | None = None
) -> list[Results]:
    """Run a program of these networks forward and backward; return for each its output, gradients and buffers by name.

    inputs: the batch of each network.
    """
    copies = [clone_model(network).double().train() for network in networks]
    stack = Stack(program, copies, {} if shapes is None else shapes)
    run = Run(program, stack.weights, stack.learned, [None] * len(networks))
    batches = zip(*(tensors_in(in_float64(batch)) for batch in inputs), strict=True)
    outputs = run.forward([torch.cat(of_networks) for of_networks in batches])
    each_output = outputs.chunk(len(networks)) if len(networks) > 1 else (outputs,)
    gradients = run.backward(torch.cat([output_gradient(output) for output in each_output]))
    stack.set_gradients(gradients)
    stack.store_statistics()
    all_results = []
    for number, (network, output) in enumerate(zip(copies, each_output, strict=True)):
        results: Results = {"output": output}
        for placeholder, stacked in gradients.items():
            name = program.names[placeholder]
            parameter = network.get_parameter(name)
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, unpadded(stacked[number], parameter.shape), rtol=0, atol=0)
            results[f"{name}.grad"] = parameter.grad
        buffers = dict(network.named_buffers(remove_duplicate=False))
        all_results.append(results | {name: buffers[name] for name in buffers if name not in program.counters})
    return all_results


def results_of_network(network: nn.Module, inputs: Any, counters: Sequence[str] = ()) -> Results:
    """Run a network itself; what `results_of` returns for one. Parameters without a gradient are left out."""
    copy = clone_model(network).double().train()
    output = call(copy, in_float64(inputs))
    output.backward(output_gradient(output))
    gradients = {f"{name}.grad": p.grad for name, p in copy.named_parameters() if p.grad is not None}
    buffers = {name: buffer for name, buffer in copy.named_buffers() if name not in counters}
    return {"output": output.detach(), **gradients, **buffers}


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        assert torch.allclose(actual[name], tensor, rtol=1e-9, atol=1e-9), name


def rewritten(network: nn.Module, example: Any, *passes: Pass) -> Program:
    """Export a network and run passes."""
    program = export_program(network, example)
    for rewrite in passes:
        program = rewrite(program)
    return program


def check_pass(network: nn.Module, example: Any, rewrite: Pass, before: Sequence[Pass] = ()) -> str:
    """Outputs, gradients and statistics are the same before and after a pass, and those of the network.

    before: passes that run first. A program that works in place cannot run; then only the network is compared with.
    Returns the rewritten program, printed.
    """
    torch.manual_seed(0)
    first = rewritten(network, example, *before)
    printed = str(first)
    second = rewrite(first)
    assert str(first) == printed  # a pass leaves its argument alone
    torch.manual_seed(1)  # for dropout
    (actual,) = results_of(second, [network], [example])
    if not any(name.endswith("_") for name in operations(printed)):
        torch.manual_seed(1)
        assert_equal(actual, results_of(first, [network], [example])[0])
    torch.manual_seed(1)
    assert_equal(actual, results_of_network(network, example, second.counters))
    return str(second)


def predicted(
    program: Program, networks: Sequence[nn.Module], inputs: Any, shapes: Shapes | None = None
) -> tuple[Tensor, Tensor]:
    """Run a program for prediction in float64; return its outputs, and those of the networks, (members × samples, …).

    inputs: the batch that all networks share.
    """
    copies = [clone_model(network).double().eval() for network in networks]
    stack = Stack(program, copies, {} if shapes is None else shapes)
    exact = in_float64(inputs)
    with torch.no_grad():
        outputs = Run(program, stack.weights, set(), None).forward(tensors_in(exact))
        return outputs, torch.cat([call(copy, clone_inputs(exact)) for copy in copies])


def check_prediction_pass(network: nn.Module, example: Any, rewrite: Pass, before: Sequence[Pass] = ()) -> str:
    """Predictions are those of the network, before and after a pass. Returns the rewritten program, printed."""
    first = export_program(network, example, training=False)
    for earlier in before:
        first = earlier(first)
    printed = str(first)
    second = rewrite(first)
    assert str(first) == printed  # a pass leaves its argument alone
    for program in (first, second):
        outputs, expected = predicted(program, [network], example)
        torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
    return str(second)


def operations(printed: str) -> list[str]:
    """List the operations of a printed program, in order."""
    return [line.split(" = ")[1].split("(")[0] for line in printed.splitlines() if " = " in line]

"""check_program(): compare a program with the networks that it was made of, in double precision.

Outputs, gradients and statistics: an operation that export has left out, a pass that is wrong and padding that changes
a result are found here, not in somebody's figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, call, clone_inputs, map_inputs, tensors_in
from structured_ensembles.cuda.capture import host_state
from structured_ensembles.cuda.channel_padding import Shapes
from structured_ensembles.cuda.operations import member_dropout
from structured_ensembles.cuda.program import Program, ProgramError
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack, unpadded
from structured_ensembles.networks.copying import clone_model


def check_program(program: Program, networks: Sequence[nn.Module], shapes: Shapes, example: Inputs) -> None:
    """Raise `ProgramError` unless a program computes what the networks do: tried in double precision.

    shapes: of the stacked tensors, by qualified name. example: at least two samples.
    One copy of a network exists at a time: a GPU that has memory for training large ones has it for this, too. Where it
    has not, that is a `ProgramError`: without a program, the networks may train all the same.
    """
    try:
        device = next(networks[0].parameters()).device
        inputs = map_inputs(lambda x: x.to(device, torch.float64 if x.is_floating_point() else x.dtype), example)
        stack = Stack(program, networks, shapes, double=True)
        run = Run(program, stack.weights, stack.learned, generators=None)
        outputs = run.forward([torch.cat([x] * len(networks)) for x in tensors_in(inputs)])
        gradients = run.backward(2 * outputs)  # of the sum of squares
        statistics = {name: tensor for name, tensor in stack.weights.items() if name not in stack.learned}
        del stack, run
        for number, (network, output) in enumerate(zip(networks, outputs.chunk(len(networks)), strict=True)):
            member_gradients, member_statistics = (
                {placeholder: stacked[number] for placeholder, stacked in tensors.items()}
                for tensors in (gradients, statistics)
            )
            # No variable holds the copy, which would keep it until the next one is made.
            _check_member(
                clone_model(network).double().train(), inputs, program, output, member_gradients, member_statistics
            )
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(f"the program fails: {first_line(error)}") from error


def _check_member(
    trial: nn.Module,
    inputs: Inputs,
    program: Program,
    output: Tensor,
    gradients: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
) -> None:
    """Compare what a program has computed for a member with its network; raise `ProgramError` where they differ.

    trial: a copy of the network. output: of the program, (samples, …). gradients, statistics: of the program for this
    member, by placeholder; they may be padded.
    """
    expected = _run_without_dropout(trial, clone_inputs(inputs), program)  # it may work in place on its inputs
    parameters = {name: p for name, p in trial.named_parameters(remove_duplicate=False) if p.requires_grad}
    buffers = dict(trial.named_buffers(remove_duplicate=False))
    network_gradients = torch.autograd.grad(
        expected.square().sum(), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    program_gradients: dict[int, Tensor] = {}  # by parameter
    for placeholder, padded in gradients.items():
        parameter = parameters[program.names[placeholder]]
        if id(parameter) in program_gradients:
            name = program.names[placeholder]
            raise ProgramError(f"the program has a parameter of the network twice, also as {name!r}")
        program_gradients[id(parameter)] = unpadded(padded, parameter.shape)
    compared = [("output", expected, output)]
    for (name, parameter), gradient in zip(parameters.items(), network_gradients, strict=True):
        compared.append((name, gradient, program_gradients.get(id(parameter), torch.zeros_like(parameter))))
    for placeholder, name in program.names.items():
        if name in buffers and name not in program.counters:
            compared.append((name, buffers[name], unpadded(statistics[placeholder], buffers[name].shape)))
    for name, of_network, of_program in compared:
        if not are_close(of_network, of_program):
            raise ProgramError(f"the program computes another {name!r} than the network")


def _run_without_dropout(trial: nn.Module, inputs: Inputs, program: Program) -> Tensor:
    """Return a network's outputs; raise `ProgramError` for another dropout than the program's, and draws on the host.

    Outputs are compared without dropout, and so do not tell.
    """
    before = host_state([trial])
    with torch.enable_grad(), WithoutDropout() as without:
        outputs: Tensor = call(trial, inputs)
    without.check_rates(program)
    if host_state([trial]) != before:
        raise ProgramError("the network draws random numbers, or keeps count, on the host")
    return outputs


def are_close(of_network: Tensor, of_program: Tensor) -> bool:
    """Tell whether two tensors differ by no more than the rounding of double precision."""
    scale = of_network.detach().abs().max().item() if of_network.numel() else 0.0
    return of_network.shape == of_program.shape and torch.allclose(
        of_network.to(of_program.dtype), of_program, rtol=1e-6, atol=1e-9 + 1e-7 * scale, equal_nan=True
    )


class WithoutDropout(TorchFunctionMode):
    """A mode in which dropout returns its input, so that outputs can be compared; it lists the rates.

    A program and a network draw different masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.functional.dropout, torch.dropout):
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def check_rates(self, program: Program) -> None:
        """Raise `ProgramError` unless the program drops out at the rates that were listed."""
        rates = [node.args[2] for node in program.nodes if node.target is member_dropout]
        if self.rates != rates:
            raise ProgramError(f"a network drops out at rates {self.rates}, the program at {rates}")

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
    ) -> Tensor:
        """Return the input and note the rate; the signature is that of both functions."""
        if p and training and train:
            self.rates.append(p)
        return input

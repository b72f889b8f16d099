"""The check of a program against its networks finds other weights, and takes little memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from structured_ensembles.cuda.compilation import compile_network
from structured_ensembles.cuda.passes import stack_members
from structured_ensembles.cuda.program import ProgramError
from structured_ensembles.cuda.program_check import check_program
from structured_ensembles.evaluation.memory import measure_peak_memory
from tests.support.programs import conv, images, norm


def small_network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(conv(3, 8), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def test_a_program_of_other_weights_is_found() -> None:
    program = compile_network(small_network(), images())
    shapes = {name: tuple(tensor.shape) for name, tensor in small_network().state_dict().items()}
    check_program(program, [small_network(seed=3)], shapes, images())
    exchanged = {
        placeholder: {"1.weight": "1.bias", "1.bias": "1.weight"}.get(name, name)
        for placeholder, name in program.names.items()
    }
    with pytest.raises(ProgramError, match="another 'output'"):
        check_program(replace(program, names=exchanged), [small_network(seed=3)], shapes, images())


def test_check_of_large_members_takes_less_memory_than_their_training() -> None:
    """Stack and gradients are four times the weights, in double precision; copies of networks come one by one."""
    networks = [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)) for _ in range(4)]
    weights = sum(parameter.nbytes for network in networks for parameter in network.parameters())
    example = torch.randn(2, 64)
    program = stack_members(compile_network(networks[0], example), len(networks))
    shapes = {name: tuple(tensor.shape) for name, tensor in networks[0].state_dict().items()}
    assert measure_peak_memory(lambda: check_program(program, networks, shapes, example)) < 5.2 * weights

"""A runner of a program: compiling kernels before the first step leaves no trace, and may fail."""

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda.capture import CaptureError
from structured_ensembles.cuda.compilation import compile_networks
from structured_ensembles.training.engine import Member, Plan
from structured_ensembles.training.program_runner import ProgramRunner
from structured_ensembles.training.state_copies import copy_state
from tests.support.kernel_checks import here
from tests.support.real_data import few_digits


class ZeroDrawer:
    """Gives batches of zeros, as a kernel does that is compiled and not launched."""

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(size, 1, 8, 8), torch.zeros(size, dtype=torch.int64)


def runner_of(network: nn.Module) -> ProgramRunner:
    data, recipe = few_digits(), se.Recipe(batch_size=16)
    plan = Plan(
        data, recipe, se.Execution(), torch.nn.functional.cross_entropy, 0, torch.device("cpu"), "none", data.shape, 1
    )
    (compiled,) = compile_networks([network], plan.example(torch.randn), False, True, print)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    return ProgramRunner([Member(network, 0, copy_state(network))], plan, compiled, [optimizer], [None])


@here
def test_compiling_kernels_leaves_statistics_of_norms_that_have_no_kernel() -> None:
    """A norm of vectors runs by PyTorch also while kernels are only compiled, on outputs that mean nothing."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6))
    network[4].running_mean += 1
    runner = runner_of(network)
    runner.drawer = ZeroDrawer()  # type: ignore[assignment]
    before = {name: tensor.clone() for name, tensor in runner.stack.weights.items()}
    runner.compile_kernels([16, 8])
    assert before
    for name, tensor in runner.stack.weights.items():
        assert torch.equal(tensor, before[name]), name


@here
def test_kernels_that_cannot_be_compiled_are_an_error_of_the_capture() -> None:
    """The engine goes on without our kernels after a `CaptureError`; any other error would end the training."""

    class NoCompiler(ZeroDrawer):
        def batch(self, size: int) -> tuple[Tensor, Tensor]:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    runner = runner_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)))
    runner.drawer = NoCompiler()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"^Failed to find C compiler\.$"):
        runner.compile_kernels([16])

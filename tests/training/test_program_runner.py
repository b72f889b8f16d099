"""A runner of a program: what compiling kernels leaves behind, and the losses of its members."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda.capture import CaptureError
from structured_ensembles.cuda.compilation import compile_networks
from structured_ensembles.data.losses import Loss, smoothed_cross_entropy
from structured_ensembles.training.engine import Member, Plan
from structured_ensembles.training.program_runner import ProgramRunner, loss_by_sample
from structured_ensembles.training.state_copies import copy_state
from structured_ensembles.training.teaching import taught_cross_entropy
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


@pytest.mark.parametrize("kind", ["labels", "smoothed", "blended", "taught"])
def test_losses_of_all_members_at_once_are_those_of_each_alone(kind: str) -> None:
    """With their gradients, in float32; outputs have more columns than there are classes."""
    torch.manual_seed(0)
    members, batch, classes = 3, 8, 5
    outputs = torch.randn(members * batch, classes + 2, requires_grad=True)
    labels, probabilities = torch.randint(classes, (members * batch,)), torch.rand(members * batch, 2, classes)
    targets = {"blended": probabilities[:, 0].softmax(-1), "taught": probabilities.softmax(-1)}.get(kind, labels)
    smoothed = partial(smoothed_cross_entropy, smoothing=0.1)
    taught = partial(taught_cross_entropy, share=0.6, temperature=2.5, smoothing=0.1)
    loss: Loss = {"labels": F.cross_entropy, "taught": taught}.get(kind, smoothed)
    by_sample = loss_by_sample(loss)
    assert by_sample is not None
    together = by_sample(outputs, targets).view(members, batch).mean(1)
    alone = torch.stack([loss(*pair) for pair in zip(outputs.chunk(members), targets.chunk(members), strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(losses.sum(), outputs)[0] for losses in (together, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_losses_of_users_are_called_member_by_member() -> None:
    """A weighted mean over samples is not the mean of weighted losses."""
    assert loss_by_sample(partial(F.cross_entropy, weight=torch.ones(5))) is None
    assert loss_by_sample(F.mse_loss) is None

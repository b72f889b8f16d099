"""Batch norm with some channels frozen."""

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.continual import NaiveLearner
from structured_ensembles.continual.partial_norm import PartlyFrozenNorm
from tests.support.continual_cases import Normalized, make_tasks


def reference(norm: nn.Module, x: Tensor, past: Tensor) -> Tensor:
    """Normalise channel by channel with plain operations."""
    results = []
    for channel in range(x.shape[1]):
        values = x[:, channel]
        frozen = bool(past[channel])
        mean = norm.running_mean[channel] if frozen else values.mean()
        variance = norm.running_var[channel] if frozen else values.var(correction=0)
        result = (values - mean) / (variance + norm.eps).sqrt()
        if norm.weight is not None:
            result = result * norm.weight[channel] + norm.bias[channel]
        results.append(result)
    return torch.stack(results, dim=1)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, 5), (6, 5, 3, 2)])
def test_partly_frozen_norm_matches_a_reference_in_outputs_gradients_and_statistics(
    affine: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    norm_type = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    norm = norm_type(5, affine=affine, momentum=0.3).double()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    past = torch.tensor([True, False, False, True, False])
    x, direction = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    expected_norm = norm_type(5, affine=affine, momentum=0.3).double()
    expected_norm.load_state_dict(norm.state_dict())
    leaves = [x.clone().requires_grad_(), *norm.parameters()]
    expected = reference(norm, leaves[0], past)
    gradients = torch.autograd.grad((expected * direction).sum(), leaves)

    frozen = PartlyFrozenNorm(norm, past)
    other = [x.clone().requires_grad_(), *frozen.parameters()]
    outputs = frozen(other[0])
    torch.testing.assert_close(outputs, expected)
    for gradient, expected_gradient in zip(
        torch.autograd.grad((outputs * direction).sum(), other), gradients, strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)
    before = expected_norm.running_mean.clone(), expected_norm.running_var.clone()
    expected_norm(x)  # torch's own update of the running statistics, for the channels that learn
    for running, old, new in zip(
        (frozen.running_mean, frozen.running_var),
        before,
        (expected_norm.running_mean, expected_norm.running_var),
        strict=True,
    ):
        assert torch.equal(running[past], old[past])
        torch.testing.assert_close(running[~past], new[~past])
    torch.testing.assert_close(frozen.eval()(x), norm.eval()(x))
    assert frozen.state_dict().keys() == norm.state_dict().keys()


def test_last_batch_is_not_tiny() -> None:
    """The running statistics of a task would be those of its few last samples."""
    sizes = []

    class Watched(Normalized):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) > 2:  # two samples try the memory layout, on a copy
                sizes.append(len(x))
            return super().forward(x)

    task = make_tasks(tasks=1)[0]
    samples = len(task.data.train)
    learner = NaiveLearner(Watched(), epochs=2, batch_size=samples - 1, quiet=True)
    learner.learn(task)
    assert sum(sizes) == 2 * samples
    assert max(sizes) - min(sizes) <= 1

"""Losses of a user's own: which of them can be trained with."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.data.losses import LikeTargets, check_training_loss


class WeightedLoss(nn.Module):
    """Cross-entropy with a learnable weight for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.weights, targets)


def test_a_loss_with_parameters_to_train_is_refused_before_any_work() -> None:
    data = se.Data.from_arrays(torch.rand(60, 4), torch.arange(60) % 3)
    model = se.zoo.mlp(4, 3, hidden=(8,))
    message = r"loss must have no parameters to train, but has weights \(3,\)"
    with pytest.raises(ValueError, match=message):
        se.structured_ensemble(model, data, members=2, loss=WeightedLoss(), quiet=True)
    with pytest.raises(ValueError, match=message):
        se.train(se.Ensemble([model]), data, loss=WeightedLoss(), quiet=True)
    with pytest.raises(ValueError, match=message):
        se.learn_scales(model, se.trace(model, data.example()), data, loss=WeightedLoss(), quiet=True)


@pytest.mark.parametrize("wrap", [attrgetter("forward"), partial])
def test_methods_and_partials_of_such_a_loss_are_refused(wrap: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError, match="no parameters to train"):
        check_training_loss(wrap(WeightedLoss()))


def test_a_frozen_loss_is_trained_with_and_a_trainable_one_evaluates() -> None:
    data = se.Data.from_arrays(torch.rand(60, 4), torch.arange(60) % 3)
    ensemble = se.Ensemble([se.zoo.mlp(4, 3, hidden=(8,))])
    recipe = se.Recipe.named("modern", epochs=1)
    se.train(ensemble, data, recipe, loss=WeightedLoss().requires_grad_(False), quiet=True)
    figures = se.evaluate(ensemble, data, split="train", loss=WeightedLoss())
    assert figures["cls/loss"] > 0


@pytest.mark.parametrize("loss", [nn.HuberLoss(), nn.L1Loss(), nn.MSELoss(), nn.SmoothL1Loss()])
def test_loss_gets_a_row_of_outputs_however_small_they_are_beside_the_targets(loss: nn.Module) -> None:
    outputs, targets = torch.randn(50, 1), torch.randn(50) * 1e5 + 3e5
    same = LikeTargets(loss)(outputs, targets)
    torch.testing.assert_close(same, loss(outputs[:, 0], targets))
    close = LikeTargets(loss)
    close(outputs, targets)
    torch.testing.assert_close(close(targets[:, None] + 1, targets), loss(targets + 1, targets))

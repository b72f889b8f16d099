"""find_offers: how often a model's code is exported."""

import pytest
import torch
from torch import Tensor, nn

from structured_ensembles.channels import trace
from structured_ensembles.tracing.fake_model import FakeModel


class Normed(nn.Module):
    """A network with a batch norm, whose code reads the mode; it may do something else in training."""

    def __init__(self, differs: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.differs = differs

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x))
        if self.training and self.differs:
            hidden = hidden * 2
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("differs", "modes"), [(False, [False, True, False]), (True, [False, True, False, True])])
def test_code_is_tried_in_training_mode_only_if_it_differs_by_more_than_counters_of_norms(
    differs: bool, modes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = []
    export = FakeModel.export

    def noted(self: FakeModel, model: nn.Module, training: bool = False, more_samples: bool = False) -> object:
        exported.append(training)
        return export(self, model, training, more_samples)

    monkeypatch.setattr(FakeModel, "export", noted)
    assert trace(Normed(differs), torch.rand(2, 3, 8, 8)).prunable == {"conv": 8}
    assert exported == modes

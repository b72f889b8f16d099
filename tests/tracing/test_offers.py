"""find_offers: how often a model's code is exported."""

import pytest
import torch
import torch.nn.functional as F
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


class Attentive(nn.Module):
    """A network with attention and an LSTM, which get the mode as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.query, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.read(x)[0]
        mixed = F.scaled_dot_product_attention(self.query(hidden), hidden, hidden, dropout_p=0.1 * self.training)
        return self.head(mixed[:, -1])  # type: ignore[no-any-return]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list of the modes in which models are exported from now on."""
    modes = []
    export = FakeModel.export

    def noted(self: FakeModel, model: nn.Module, training: bool = False, more_samples: bool = False) -> object:
        modes.append(training)
        return export(self, model, training, more_samples)

    monkeypatch.setattr(FakeModel, "export", noted)
    return modes


@pytest.mark.parametrize(("differs", "modes"), [(False, [False, True, False]), (True, [False, True, False, True])])
def test_code_is_tried_in_training_mode_only_if_it_differs_by_more_than_counters_of_norms(
    differs: bool, modes: list[bool], exported: list[bool]
) -> None:
    assert trace(Normed(differs), torch.rand(2, 3, 8, 8)).prunable == {"conv": 8}
    assert exported == modes


def test_dropout_of_attention_and_recurrent_layers_is_no_other_code(exported: list[bool]) -> None:
    assert trace(Attentive(), torch.rand(2, 5, 6)).prunable == {"read": 8}
    assert exported.count(True) == 1  # followed, but not tried on fewer channels

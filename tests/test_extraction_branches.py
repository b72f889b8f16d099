"""Code that branches on a number of channels: extraction refuses the numbers with which it does something else."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.tracing.code_trial import CodeTrial


class Branching(nn.Module):
    """Two hidden layers; the second one's activation depends on its width by `takes_tanh`."""

    def __init__(self, takes_tanh: str) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.takes_tanh = takes_tanh

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).relu())
        width = hidden.shape[1]
        branch = {"multiple of 3": width % 3 == 0, "narrow": width <= 10, "training": self.training and width == 48}
        if self.takes_tanh == "error" and width == 48:
            raise RuntimeError("48 is not supported")
        return self.last(hidden.tanh() if branch.get(self.takes_tanh, False) else hidden.relu())


def _subnet(graph: se.ChannelGraph, kept: int) -> se.Subnet:
    return se.Subnet(tuple((name, size, tuple(range(kept))) for name, size in graph.prunable.items()))


@pytest.mark.parametrize(("branch", "refused"), [("multiple of 3", 48), ("narrow", 10), ("training", 48)])
def test_numbers_of_channels_with_which_the_code_takes_another_branch_are_refused(branch: str, refused: int) -> None:
    model = Branching(branch)
    graph = se.trace(model, torch.randn(4, 8))
    assert set(graph.prunable) == {"first", "second"}  # the numbers that `trace` tried show nothing
    with pytest.raises(ValueError, match=r"does something else with as many channels.*relu in the model itself"):
        se.extract(model, graph, _subnet(graph, refused))
    assert se.extract(model, graph, _subnet(graph, 32)).second.out_features == 32


class Copying(nn.Module):
    """A linear layer over the channels, moved back to where they were and copied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.last = nn.Conv2d(3, 5, 1), nn.Linear(5, 6), nn.Linear(6 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous().flatten(1))


def test_a_copy_that_a_single_channel_does_not_need_is_no_other_branch() -> None:
    model, x = Copying().double().eval(), torch.randn(4, 3, 4, 4).double()
    graph = se.trace(model, x)
    subnet = _subnet(graph, 1)
    assert {"conv", "linear"} <= set(graph.prunable)
    assert se.extract(model, graph, subnet)(x).shape == (4, 3)


def test_code_that_fails_with_some_number_is_refused_with_its_error() -> None:
    model = Branching("error")
    graph = se.trace(model, torch.randn(4, 8))
    with pytest.raises(ValueError, match="it fails: 48 is not supported"):
        se.extract(model, graph, _subnet(graph, 48))


def test_members_of_equal_numbers_share_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    trial = CodeTrial._try
    monkeypatch.setattr(CodeTrial, "_try", lambda self, numbers: tried.append(dict(numbers)) or trial(self, numbers))
    model = se.zoo.mlp(8, num_classes=3)
    graph = se.trace(model, torch.randn(4, 8))
    for subnet in se.select(graph, prune=0.5, selection="random", members=3):
        se.extract(model, graph, subnet)
    assert len(tried) == 1
    se.extract(
        model, graph, se.Subnet(tuple((name, size, tuple(range(size))) for name, size in graph.prunable.items()))
    )
    assert len(tried) == 1  # nothing is removed: nothing to try


def test_a_graph_is_still_copied_and_pickled() -> None:
    graph = se.trace(Branching("narrow"), torch.randn(4, 8))
    assert copy.deepcopy(graph).trial is graph.trial
    assert pickle.loads(pickle.dumps(graph)) == graph

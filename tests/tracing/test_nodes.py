"""Sizes that depend on data: positions that a mask picks, as where a network reads the token that ends a text."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.exactness import check_exact, randomize

END = 1


def texts(samples: int = 3, length: int = 6) -> Tensor:
    """Return token ids, (samples, length), with the end at another place in each sample."""
    ids = torch.randint(2, 9, (samples, length), generator=torch.Generator().manual_seed(0))
    return ids.scatter(1, torch.arange(samples)[:, None] + 1, END)


class Ended(nn.Module):
    """Read the features of the token that ends each text, as BART and T5 do."""

    def __init__(self, hard: bool = False) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(9, 8), nn.Linear(8, 10), nn.Linear(10, 3)
        self.width = 8 if hard else -1

    def forward(self, ids: Tensor) -> Tensor:
        features = self.embed(ids)
        ends = features[ids == END, :]
        features = ends.view(len(ids), -1, features.shape[-1])[:, -1] + features.view(*ids.shape, self.width).mean(1)
        return self.head(self.hidden(features).relu())


def test_channels_at_positions_that_a_mask_picks_can_go() -> None:
    graph = check_exact(randomize(Ended()), texts())
    assert graph.prunable == {"embed": 8, "hidden": 10}


def test_a_graph_with_sizes_that_depend_on_data_is_not_cut() -> None:
    """The code relies on the features of the embedding; the other layer is found by running it on fake tensors."""
    graph = check_exact(randomize(Ended(hard=True)), texts())
    assert graph.prunable == {"hidden": 10}
    assert "relies on its size" in str(graph["embed"].reason)
    assert not graph.templates


class EndedOnce(Ended):
    """Rely on exactly one end in each text, so that fewer positions than all are picked."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(ids)[ids == END].view(len(ids), -1)).relu())


def test_a_size_that_the_code_relies_on_is_the_one_that_is_followed() -> None:
    graph = check_exact(randomize(EndedOnce()), texts())
    assert graph.prunable == {"embed": 8, "hidden": 10}


class Picked(nn.Module):
    """Two linear layers; what a function picks of the hidden features in between is added to all of them."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.pick = nn.Linear(6, 8), nn.Linear(8, 2), pick

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden + self.pick(x, hidden))


def rows() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("pick", "reason"),
    [
        (lambda _, hidden: hidden[hidden > 0].amax(), "a mask picks single channels"),
        (lambda _, hidden: hidden[:, hidden.amax(0) > 0].amax(), "a mask picks single channels"),
        (lambda x, hidden: hidden[x[:, 0] > 0, x[:1, 0].long()].amax(), "an index by a mask and others"),
        (lambda _, hidden: hidden.masked_select(hidden > 0.5).amax(), "masked_select is not understood"),
        (lambda _, hidden: hidden.nonzero().amax(), "nonzero is not understood"),
    ],
)
def test_channels_that_a_mask_picks_are_fixed(pick: Callable[[Tensor, Tensor], Tensor], reason: str) -> None:
    graph = check_exact(randomize(Picked(pick)), rows())
    assert graph["first"].reason == reason


def test_a_mask_of_samples_leaves_the_channels() -> None:
    graph = check_exact(randomize(Picked(lambda x, hidden: hidden[x[:, 0] > 0].sum(0))), rows())
    assert graph.prunable == {"first": 8}

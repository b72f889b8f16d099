"""without_channels: the weights that a dropped channel has in other layers are zero, and no others."""

import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.checking.masking import input_dim, positions_of, without_channels
from structured_ensembles.networks.resizing import Span
from structured_ensembles.selection import Subnet


class Attention(nn.Module):
    """Queries and keys that only a product reads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) @ self.key(x).mT


def test_positions_lie_in_blocks_behind_the_spans_before() -> None:
    axis = (Span("a", 2), Span("b", 3, 4), Span("a", 2))
    assert positions_of(axis, "b", [0, 2]) == [2, 3, 4, 5, 10, 11, 12, 13]
    assert positions_of(axis, "a", [1]) == [1, 15]
    assert positions_of(axis, "c", [0]) == []


def test_readers_lose_columns_and_nothing_else_changes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 2))
    graph = se.trace(model, torch.rand(1, 1, 2, 2))
    masked = without_channels(model, graph, Subnet((("0", 3, (0, 2)),)))
    expected = model[3].weight.detach().clone()
    expected[:, 4:8] = 0  # the four pixels of channel 1
    assert torch.equal(masked[3].weight, expected)
    assert torch.equal(masked[0].weight, model[0].weight)
    assert torch.equal(masked[0].bias, model[0].bias)
    assert bool((model[3].weight != 0).all()), "the model is not changed"


def test_transposed_convolutions_have_their_inputs_first() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ConvTranspose2d(3, 2, 2))
    graph = se.trace(model, torch.rand(1, 1, 2, 2))
    masked = without_channels(model, graph, Subnet((("0", 3, (1,)),)))
    assert masked[1].weight.detach().abs().sum((1, 2, 3)).ne(0).tolist() == [False, True, False]
    assert (input_dim(model[0]), input_dim(model[1])) == (1, 0)


def test_a_group_that_only_a_product_reads_loses_its_rows() -> None:
    model = Attention()
    graph = se.trace(model, torch.rand(5, 3))
    assert graph.prunable == {"query": 4}
    assert graph["query"].consumers == ()
    masked = without_channels(model, graph, Subnet((("query", 4, (0, 3)),)))
    x = torch.rand(5, 3)
    kept = [0, 3]
    expected = model.query(x)[:, kept] @ model.key(x)[:, kept].mT
    torch.testing.assert_close(masked(x), expected)

"""Positions that are picked or repeated: gather, repeats for each sample, and constants of a size."""

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.networks.graph_network import GraphNetwork
from tests.support.exactness import check_exact, random_subnets, randomize

HEADS, TOKENS = 2, 5


def tokens(samples: int = 3) -> Tensor:
    return torch.randn(samples, TOKENS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Disentangled(nn.Module):
    """Attention with a score for each distance of two tokens, as DeBERTa has it, and a linear layer after it.

    The table of distances is repeated for every sample; each pair of tokens gathers its distance's score; scores are
    divided by the root of a constant that the code makes of a size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.place = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(4, 8)
        self.out, self.hidden, self.head = nn.Linear(8, 6), nn.Linear(6, 10), nn.Linear(10, 3)
        self.table = nn.Parameter(torch.randn(2 * TOKENS - 1, 4))
        distances = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None] + TOKENS - 1
        self.register_buffer("distances", distances, persistent=False)

    def split(self, x: Tensor) -> Tensor:
        """Return (samples · heads, tokens, features)."""
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2).reshape(-1, x.shape[1], x.shape[2] // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        query, value = self.split(self.query(x)), self.split(self.value(x))
        places = self.split(self.place(self.table)[None]).repeat(len(x), 1, 1)
        scale = torch.sqrt(torch.tensor(query.shape[-1], dtype=torch.float32) * 3)
        scores = query @ places.mT / scale.to(x.dtype)
        scores = torch.gather(scores, -1, self.distances.expand(len(query), -1, -1))
        mixed = (scores.softmax(-1) @ value).view(len(x), HEADS, TOKENS, -1).transpose(1, 2).flatten(2)
        return self.head(self.hidden(self.out(mixed)).relu()).mean(1)


def test_a_constant_of_a_size_is_held_against_the_channels_of_that_size() -> None:
    graph = check_exact(randomize(Disentangled()), tokens(), graphs=False)
    assert graph.prunable == {"value[within]": 4, "out": 6, "hidden": 10}


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_a_cut_graph_repeats_and_gathers_for_as_many_samples_as_it_gets(samples: int) -> None:
    model = randomize(Disentangled())
    graph = se.trace(model, tokens())
    assert graph["query[within]"].prunable
    (subnet,) = random_subnets(graph, 0.5)
    small, masked = se.extract(model, graph, subnet), without_channels(model, graph, subnet)
    assert isinstance(small, GraphNetwork)
    with torch.no_grad():
        torch.testing.assert_close(small.eval()(tokens(samples)), masked.eval()(tokens(samples)), atol=1e-9, rtol=1e-9)


class Gathering(nn.Module):
    """Two linear layers, between which positions of one dimension are gathered."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.first, self.last, self.dim = nn.Linear(6, 8), nn.Linear(8, 2), dim
        self.register_buffer("picked", torch.arange(count) % 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        shape = (len(x), -1, 1) if self.dim == 1 else (len(x), 1, -1)
        sizes = (-1, -1, hidden.shape[2]) if self.dim == 1 else (-1, hidden.shape[1], -1)
        return self.last(hidden.gather(self.dim, self.picked.view(1, *shape[1:]).expand(len(x), -1, -1).expand(sizes)))


@pytest.mark.parametrize(("dim", "count", "prunable"), [(1, 4, {"first": 8}), (2, 8, {})])
def test_gather_fixes_only_the_dimension_that_it_picks_from(dim: int, count: int, prunable: dict[str, int]) -> None:
    graph = check_exact(randomize(Gathering(dim, count)), tokens())
    assert graph.prunable == prunable
    assert prunable or graph["first"].reason == "gather picks single channels"

"""trace() and extract() of recurrent layers and embeddings."""

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from tests.support.exactness import check_exact, randomize


class Reader(nn.Module):
    """Tokens, an embedding, a recurrent layer, and a linear layer on its last output or its last state."""

    def __init__(self, kind: str = "LSTM", last: str = "output", **options: object) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(20, 8), last
        self.read = getattr(nn, kind)(8, 12, batch_first=True, **options)
        directions = 2 if self.read.bidirectional and last == "output" else 1
        self.head = nn.Linear(12 * directions, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, state = self.read(self.embed(tokens))
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(outputs[:, -1] if self.last == "output" else hidden[-1])


TOKENS = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
@pytest.mark.parametrize("last", ["output", "state"])
def test_hidden_units_of_all_gates_go_together(kind: str, options: dict[str, object], last: str) -> None:
    graph = check_exact(randomize(Reader(kind, last, **options)), TOKENS)
    assert graph.prunable == {"embed": 8, "read": 12}
    assert "head" in graph["read"].consumers


def test_cut_recurrent_layer_is_an_ordinary_one_of_fewer_units() -> None:
    model = Reader("LSTM", num_layers=2)
    graph = se.trace(model, TOKENS)
    small = se.extract(model, graph, se.select(graph, prune=0.5, selection="random", members=1)[0])
    assert (small.read.input_size, small.read.hidden_size, small.embed.embedding_dim) == (4, 6, 4)
    assert small.read.weight_ih_l1.shape == (24, 6)
    assert len(small.read.all_weights[0]) == 4
    assert all(one is other for one, other in zip(small.read._flat_weights, small.read.parameters(), strict=True))


def test_recurrent_layer_with_projections_is_fixed_with_a_reason() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.head = nn.LSTM(4, 8, proj_size=3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.read(x)[0][:, -1])

    graph = se.trace(Projected(), torch.randn(2, 5, 4))
    assert (graph["read"].size, graph["read"].reason) == (3, "lstm with projections")
    assert "lstm with projections" in str(graph)
    with pytest.raises(ValueError, match="no prunable channels"):
        se.select(graph, prune=0.5, selection="random", members=2)


def test_cells_in_a_loop_are_shown_once_with_the_reason_why_they_are_fixed() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Linear(4, 6), nn.GRUCell(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 8)
            for step in self.embed(x).unbind(1):
                state = self.cell(step, state)
            return self.head(state)

    graph = se.trace(Steps(), torch.randn(2, 5, 4))
    assert [group.name for group in graph.groups] == ["embed", "cell.weight_hh", "head"]
    assert graph["cell.weight_hh"].reason == "gru_cell: the code that calls it has a state of this size"
    assert graph["cell.weight_hh"].size == 8
    assert not graph.prunable


@pytest.mark.parametrize("last", ["output", "state"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_scales_act_on_outputs_and_last_states(last: str, bidirectional: bool) -> None:
    """A factor of zero for every unit but one leaves what the head makes of that unit, for each member."""
    from structured_ensembles.scaling import apply_scales, can_share_batches

    model = randomize(Reader("GRU", last, bidirectional=bidirectional)).eval()
    graph = se.trace(model, TOKENS)
    vectors = {"embed": torch.ones(2, 8).double(), "read": torch.zeros(2, 12).double()}
    vectors["read"][0, 3] = vectors["read"][1, 7] = 2.0
    with torch.no_grad():
        outputs, state = model.read(model.embed(TOKENS))
        hidden = outputs[:, -1] if last == "output" else state[-1]
        assert can_share_batches(model, graph, "output", TOKENS)
        with apply_scales(model, graph, vectors, "output") as run:
            scaled = run(torch.cat([TOKENS, TOKENS]))
        units = hidden.shape[1] // 12
        for member, unit in enumerate((3, 7)):
            mask = torch.zeros(12).double()
            mask[unit] = 2.0
            expected = model.head(hidden * mask.repeat(units))
            torch.testing.assert_close(scaled.view(2, 4, 3)[member], expected)


def test_first_states_that_a_layer_computes_lose_units_but_no_layers() -> None:
    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.layer, self.head = nn.Linear(6, 16), nn.GRU(6, 8, 2, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = self.start(x[:, 0]).view(-1, 2, 8).transpose(0, 1).contiguous()
            return self.head(self.layer(x, state)[0][:, -1])

    x = torch.randn(3, 4, 6, dtype=torch.float64)
    graph = check_exact(randomize(Started()), x, coupled=True, nested="all")
    assert graph.prunable == {"start": 8}

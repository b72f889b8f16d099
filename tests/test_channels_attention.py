"""trace() and extract() of attention: whole heads, query and key features, value features."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.networks.graph_network import GraphNetwork
from structured_ensembles.networks.resizing import channel_indices
from tests.support.exactness import check_exact, randomize


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 5, 6)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Attention(nn.Module):
    """Attention between two linear layers, written in one of several ways.

    way: "fused" one linear layer for queries, keys and values; "separate" one for each; "grouped" fewer heads of keys;
        "einsum"; "eager" by matrix products. hard: whether the code knows the size of a head.
    """

    def __init__(self, way: str, hard: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.way, self.hard, self.heads, self.size = way, hard, 4, 8
        self.embed, self.proj, self.head = nn.Linear(6, 16), nn.Linear(32, 16), nn.Linear(16, 3)
        if way == "fused":
            self.qkv = nn.Linear(16, 96)
        else:
            keys = 16 if way == "grouped" else 32
            self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, keys), nn.Linear(16, keys)
        self.table = nn.Parameter(torch.randn(9, 4)) if bias else None
        offsets = torch.arange(5)[:, None] - torch.arange(5)[None] + 4
        self.register_buffer("offsets", offsets, persistent=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, heads, self.size) if self.hard else (batch, length, heads, -1)
        return x.view(shape).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = None if self.table is None else self.table[self.offsets].permute(2, 0, 1)
        if self.way == "einsum":
            return torch.einsum("bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * 0.3).softmax(-1), v)
        if self.way == "eager":
            scores = q @ k.transpose(-1, -2) * 8**-0.5
            return (scores if bias is None else scores + bias).softmax(-1) @ v
        if self.way == "grouped":
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(t), 4, 5, -1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).relu()
        if self.way == "fused":
            q, k, v = self.qkv(x).view(len(x), 5, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            few = 2 if self.way == "grouped" else 4
            q, k, v = self.split(self.q(x), 4), self.split(self.k(x), few), self.split(self.v(x), few)
        out = self.attend(q, k, v).transpose(1, 2)
        return self.head(self.proj(out.reshape(len(x), 5, -1)).mean(1))


@pytest.mark.parametrize("way", ["fused", "separate", "grouped", "einsum", "eager"])
@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("nested", ["finest", "all"])
def test_attention_is_cut_exactly(way: str, hard: bool, nested: str) -> None:
    model = randomize(Attention(way, hard))
    graph = check_exact(model, tokens(), nested=nested)
    features = {name: size for name, size in graph.prunable.items() if "[within]" in name}
    assert set(features.values()) == {8}
    assert len(features) == (1 if way == "fused" else 2)  # queries with keys, and values: of one layer they go together
    heads = {name: size for name, size in graph.prunable.items() if "[groups" in name}
    assert bool(heads) == (nested == "all")
    if way == "grouped" and nested == "all":
        assert sorted(heads.values()) == [2, 2]  # the heads of keys, and the queries of each


def test_heads_with_a_table_of_position_biases_are_cut_exactly() -> None:
    for way in ("separate", "eager"):
        model = randomize(Attention(way, bias=True))
        graph = check_exact(model, tokens(), nested="all")
        assert [span.group for span in graph.axes["table"][1]] == ["q[groups]"]


def test_scale_stays_that_of_the_full_head() -> None:
    """PyTorch's default scale follows the size of a head: code that leaves it out is cut in the graph."""
    graph = se.trace(Attention("separate", hard=False).double(), tokens())
    assert graph["q[within]"].in_code
    assert graph["v[within]"].in_code is None or graph["v[within]"].prunable
    model = randomize(Attention("separate", hard=False))
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    small = se.extract(model, graph, subnet)
    assert isinstance(small, GraphNetwork)
    scales = [
        operation.keywords["scale"]
        for operation in small.graphs[False].operations
        if operation.name.startswith("aten::scaled_dot_product_attention")
    ]
    assert scales == [8**-0.5]


class Torch(nn.Module):
    """PyTorch's own attention or encoder layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(6, 16), layer, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return self.head(y.mean(1))


@pytest.mark.parametrize("nested", ["finest", "all"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.MultiheadAttention(16, 2, batch_first=True),
        lambda: nn.MultiheadAttention(16, 4, batch_first=True, bias=False),
        lambda: nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), 2),
    ],
)
def test_attention_of_pytorch_is_cut_exactly(layer, nested: str) -> None:
    graph = check_exact(randomize(Torch(layer())), tokens(), nested=nested)
    assert any("in_proj_weight" in name for name in graph.prunable)


def test_layer_norms_stay_whole_unless_approximate() -> None:
    model = Torch(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)).double()
    stream = se.trace(model, tokens(), coupled=True)["embed"]
    assert "layer norm mixes its channels: exact only with all of them" in str(stream.reason)
    graph = se.trace(model, tokens(), coupled=True, approximate=True)
    assert graph["embed"].prunable
    assert graph["embed"].approximate
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    small = se.extract(model, graph, subnet)
    assert small(tokens()).shape == (3, 3)
    assert (
        sum(p.numel() for p in small.parameters()) == graph.num_parameters(subnet.counts) < graph.num_parameters() / 3
    )


def test_heads_that_hold_queries_keys_and_values_side_by_side_are_cut_within() -> None:
    """As in LeViT: each head of one layer's output is a piece of queries, one of keys and one of values."""

    class Side(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm, self.proj = nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.qkv(x)
            y = self.norm(y.flatten(0, 1)).reshape_as(y).view(len(x), 5, 2, 20)
            q, k, v = y.split([4, 4, 12], 3)
            scores = (q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) * 0.5).softmax(-1)
            return self.proj((scores @ v.transpose(1, 2)).transpose(1, 2).reshape(len(x), 5, 24)).mean(1)

    model = randomize(Side())
    graph = se.trace(model, tokens())
    assert sorted(graph.prunable.values()) == [4, 12]
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    small = se.extract(model, graph, subnet)
    assert small.qkv.out_features == 2 * (2 + 2 + 6)
    masked = without_channels(model, graph, subnet)
    with torch.no_grad():  # zero after the norm is what the dropped queries, keys and values are
        for name, size, kept in subnet.groups:
            dropped = torch.tensor([channel not in kept for channel in range(size)])
            rows = channel_indices(graph.axes["norm.weight"][0], name)
            for parameter in (masked.norm.weight, masked.norm.bias):
                parameter[torch.from_numpy(rows >= 0) & dropped[torch.from_numpy(rows).clamp_min(0)]] = 0
        torch.testing.assert_close(small.eval()(tokens()), masked.eval()(tokens()))


class SharedKeys(nn.Module):
    """Attention in which two heads of queries share each head of keys and values, whose sizes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 16), nn.Linear(6, 8), nn.Linear(6, 6)
        self.merge, self.head = nn.Linear(12, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.query, 4), (self.key, 2), (self.value, 2))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.head(self.merge(mixed.transpose(1, 2).flatten(2)))


def test_heads_that_share_keys_go_with_them() -> None:
    graph = check_exact(randomize(SharedKeys()), torch.randn(2, 5, 6, dtype=torch.float64), nested="all")
    shared = next(group for group in graph.groups if set(group.producers) == {"query", "key", "value"})
    assert shared.size == 2
    assert {group.size for group in graph.groups if group.producers == ("query",)} == {2}
    assert {group.size for group in graph.groups if group.producers == ("query", "key")} == {4}


def test_values_at_positions_that_keys_count_stay() -> None:
    # Keys and values lie along channels of two layers: softmax runs over both.
    class OverChannels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(5, 2)
            self.query = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (layer(x).unsqueeze(-1) for layer in (self.query, self.key, self.value))
            return self.head(F.scaled_dot_product_attention(query, key, value).squeeze(-1))

    graph = check_exact(randomize(OverChannels()), torch.randn(3, 6, dtype=torch.float64))
    assert graph.prunable == {"query": 5}
    assert graph["key"].producers == ("key", "value")

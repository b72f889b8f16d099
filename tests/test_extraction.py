"""extract(): an ordinary, smaller module with the kept weights."""

import pytest
import torch
from torch import nn

import structured_ensembles as se


@pytest.fixture(scope="module")
def walk() -> tuple[nn.Module, se.ChannelGraph, se.Subnet]:
    torch.manual_seed(0)
    model = se.zoo.resnet20()
    graph = se.trace(model, torch.randn(2, 3, 16, 16))
    return model, graph, se.select(graph, prune=0.5, selection="random", members=1)[0]


def test_extracted_weights_equal_the_kept_channels(walk) -> None:
    model, graph, subnet = walk
    small = se.extract(model, graph, subnet)
    kept = list(subnet.kept["layer2.0.conv1"])
    assert torch.equal(small.layer2[0].conv1.weight, model.layer2[0].conv1.weight[kept])
    assert torch.equal(small.layer2[0].conv2.weight, model.layer2[0].conv2.weight[:, kept])
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(small.layer2[0].bn1, name), getattr(model.layer2[0].bn1, name)[kept])


def test_extracted_network_is_an_ordinary_trainable_module(walk) -> None:
    small = se.extract(*walk)
    block = small.layer1[0]
    assert (block.conv1.out_channels, block.bn1.num_features, block.conv2.in_channels) == (8, 8, 8)
    assert "Conv2d(16, 8, kernel_size=(3, 3)" in str(small)
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(small(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    small.eval()
    exported = torch.export.export(small, (x,)).module()
    torch.testing.assert_close(exported(x), small(x))
    compiled = torch.compile(small, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), small(x))
    assert se.trace(small, x).prunable == {name: size // 2 for name, size in walk[1].prunable.items()}


def test_depthwise_convolutions_have_the_right_number_of_groups() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, groups=8), nn.PReLU(16), nn.Conv2d(16, 2, 1))
    x = torch.randn(2, 3, 6, 6)
    graph = se.trace(model, x)
    small = se.extract(model, graph, se.Subnet((("0", 8, (1, 4, 6)),)))
    assert (small[1].groups, small[1].in_channels, small[1].out_channels, small[2].num_parameters) == (3, 3, 6, 6)
    assert torch.equal(small[1].weight, model[1].weight[[2, 3, 8, 9, 12, 13]])
    assert small(x).shape == (2, 2, 4, 4)


def test_reinit_draws_new_weights_from_the_models_own_distribution(walk) -> None:
    model, graph, subnet = walk
    inherited = se.extract(model, graph, subnet)
    first, same, other = (se.extract(model, graph, subnet, reinit=True, seed=seed) for seed in (0, 0, 1))
    weights = [net.layer3[1].conv1.weight for net in (inherited, first, same, other)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[3])
    assert float(weights[1].detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)  # Kaiming
    state = torch.get_rng_state()
    se.extract(model, graph, subnet, reinit=True)
    assert torch.equal(torch.get_rng_state(), state)
    plain = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    graph = se.trace(plain, torch.randn(2, 3))
    net = se.extract(plain, graph, se.Subnet((("0", 6, (1, 2)),)), reinit=True)
    assert not torch.equal(net[0].weight, plain[0].weight[1:3])


def test_flags_modes_and_memory_format_are_inherited(walk) -> None:
    _, graph, subnet = walk
    model = se.zoo.resnet20().eval().to(memory_format=torch.channels_last)
    model.fc.weight.requires_grad_(False)
    small = se.extract(model, graph, subnet)
    assert not small.training
    assert not small.fc.weight.requires_grad
    assert small.layer3[0].conv1.weight.requires_grad
    assert small.layer3[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_subnets_and_graphs_of_other_models_are_refused(walk) -> None:
    model, graph, subnet = walk
    with pytest.raises(ValueError, match="no prunable group 'fc'"):
        se.extract(model, graph, se.Subnet((("fc", 10, (0,)),)))
    with pytest.raises(ValueError, match="must be ascending"):
        se.extract(model, graph, se.Subnet((("layer1.0.conv1", 16, (3, 1)),)))
    with pytest.raises(ValueError, match="must be ascending"):
        se.extract(model, graph, se.Subnet((("layer1.0.conv1", 16, ()),)))
    with pytest.raises(ValueError, match="traced from another model"):
        se.extract(se.zoo.resnet20(num_classes=7), graph, subnet)

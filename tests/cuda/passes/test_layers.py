"""Convolutions, linear layers and dropout get the member as an axis of their weights, where that is possible."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda.passes import replace_dropout, replace_layers
from tests.support.programs import Model, check_pass, conv, images, operations, results_of, rewritten


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "stride=1, padding=1"),
        ({"stride": 2}, "stride=2, padding=1"),
        ({"padding": 0}, "stride=1, padding=0"),
        ({"bias": True}, "0.bias, stride=1, padding=1"),
    ],
)
def test_a_convolution_is_replaced(options: dict[str, Any], shown: str) -> None:
    printed = check_pass(nn.Sequential(conv(**options)), images(), replace_layers)
    assert f"member_conv(input_1, 0.weight, {shown}" in printed.replace("None, ", "")


@pytest.mark.parametrize(
    "options",
    [
        {"dilation": 2}, {"stride": (1, 2)}, {"padding": (0, 1)}, {"padding": "same"}, {"padding_mode": "reflect"},
        {"inputs": 6, "outputs": 6, "groups": 2},
    ],
)  # fmt: skip
def test_other_convolutions_stay(options: dict[str, Any]) -> None:
    layer = conv(**options)
    names = operations(check_pass(nn.Sequential(layer), images(channels=layer.in_channels), replace_layers))
    if options == {"padding_mode": "reflect"}:
        assert names == ["pad", "member_conv"]  # the padding is an operation of its own
    else:
        assert "member_conv" not in names


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_replaced_whatever_the_rank_of_its_input(bias: bool) -> None:
    for shape in ((2, 6), (2, 3, 6), (2, 3, 2, 6)):
        printed = check_pass(nn.Sequential(nn.Linear(6, 4, bias=bias)), torch.randn(shape), replace_layers)
        assert operations(printed) == ["member_linear"]


def test_computed_weights_stay() -> None:
    network = Model(lambda self, x: F.linear(x, self.layer.weight * 2), layer=nn.Linear(6, 4))
    assert operations(check_pass(network, torch.randn(2, 6), replace_layers)) == ["mul", "linear"]
    network = Model(lambda self, x: F.conv2d(x, self.layer.weight.relu()), layer=conv())
    assert operations(check_pass(network, images(), replace_layers)) == ["relu", "conv2d"]


def test_a_layer_used_twice_has_the_sum_of_both_gradients() -> None:
    network = Model(lambda self, x: self.layer(self.layer(x).relu()), layer=nn.Linear(6, 6))
    assert operations(check_pass(network, torch.randn(2, 6), replace_layers)).count("member_linear") == 2


def test_dropout_draws_the_same_mask_as_pytorch() -> None:
    """`check_pass` seeds before both programs and the network."""
    network = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.3), nn.Linear(20, 30), nn.Dropout(0.6))
    names = operations(check_pass(network, torch.randn(2, 6), replace_dropout))
    assert names == ["linear", "member_dropout", "linear", "member_dropout"]


def test_dropout_of_everything_leaves_zeros() -> None:
    check_pass(nn.Sequential(nn.Linear(6, 4), nn.Dropout(1.0)), torch.randn(2, 6), replace_dropout)


def test_dropout_that_does_nothing_is_left_out() -> None:
    network = Model(lambda self, x: F.dropout(self.none(self.c(x)), 0.5, training=False), c=conv(), none=nn.Dropout(0))
    assert operations(check_pass(network, images(), replace_dropout)) == ["conv2d"]


def test_members_draw_masks_of_their_own_generators() -> None:
    network = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5))
    x = torch.randn(2, 6)
    program = rewritten(network, x, replace_layers, replace_dropout)
    from structured_ensembles.cuda.running import Run
    from structured_ensembles.cuda.stacking import Stack

    def masks(*seeds: int) -> list[Tensor]:
        stack = Stack(program, [network] * len(seeds), {})
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        outputs = Run(program, stack.weights, stack.learned, generators).forward([torch.cat([x] * len(seeds))])
        return [output != 0 for output in outputs.chunk(len(seeds))]

    alone, both = masks(7), masks(3, 7)
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1])
    assert 20 < int(alone[0].sum()) < 80  # of a hundred


def test_a_feature_dropout_stays() -> None:
    network = nn.Sequential(conv(), nn.Dropout2d(0.5))
    program = rewritten(network, images(), replace_dropout)
    assert operations(str(program)) == ["conv2d", "feature_dropout"]
    torch.manual_seed(0)
    assert results_of(program, [network], [images()])[0]["output"].shape == (2, 4, 6, 6)

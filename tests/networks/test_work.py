"""estimate_work(): multiply-adds by hand."""

import math

import torch
from torch import nn

from structured_ensembles.networks.work import estimate_work


def test_work_is_that_of_convolutions_and_linear_layers() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    network.train()
    expected = 4 * 36 * 3 * 9 + 10 * 4 * 36
    assert estimate_work(network, torch.rand(2, 3, 6, 6)) == expected
    assert estimate_work(nn.Conv2d(4, 4, 1, groups=2), torch.rand(3, 4, 5, 5)) == 4 * 25 * 2
    assert network.training
    assert int(network[1].num_batches_tracked) == 0
    assert math.isinf(estimate_work(network, torch.rand(2, 1, 6, 6)))  # it fails: the training says why

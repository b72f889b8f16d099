"""The counter-based generator: SplitMix64, equal by scalars and by tensors."""

import torch
from scipy.stats import chisquare

from structured_ensembles.data.drawing import _MASK, _STEP, _mix, draw, fold, shuffle


def test_mix_equals_splitmix64() -> None:
    # The first numbers of the reference implementation, seeded with 0.
    assert [_mix(number * _STEP) for number in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_tensor_draws_equal_scalar_draws() -> None:
    for seed in (0, 7, (3, 1), (3, 1, 2)):
        expected = [_mix((fold(seed) + number * _STEP) & _MASK) & (2**63 - 1) for number in range(50)]
        assert draw(seed, 50).tolist() == expected
    assert len({fold(seed) for seed in (0, 1, (0, 0), (0, 1), (1, 0), (0, 0, 0))}) == 6


def test_shuffled_orders_are_uniform_permutations() -> None:
    index = torch.arange(100, 120)
    assert shuffle(index, (1, 2)).sort().values.equal(index)
    assert not shuffle(index, (1, 2)).equal(shuffle(index, (1, 3)))
    first = torch.stack([shuffle(torch.arange(10), (5, epoch))[0] for epoch in range(2000)])
    assert chisquare(first.bincount(minlength=10).numpy()).pvalue > 1e-3
    assert chisquare((draw(9, 20000) % 9).bincount(minlength=9).numpy()).pvalue > 1e-3

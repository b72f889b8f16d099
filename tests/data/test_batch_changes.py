"""Cutout and mixup of batches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

import structured_ensembles as se
from structured_ensembles.data.batch_changes import changes_for, check_mixup, cut_out, draw_shares, mix, stack_changes
from structured_ensembles.data.drawing import draw
from structured_ensembles.data.losses import smoothed_cross_entropy
from tests.support.real_data import few_digits


def test_cutout_is_a_square_around_its_centre_within_the_image() -> None:
    images = torch.ones(3, 2, 8, 8)
    cut = cut_out(images, torch.tensor([[4, 3], [0, 0], [7, 7]]))
    expected = images.clone()
    expected[0, :, 2:6, 1:5] = 0
    expected[1, :, :2, :2] = 0
    expected[2, :, 5:, 5:] = 0
    assert torch.equal(cut, expected)
    assert torch.equal(images, torch.ones(3, 2, 8, 8))
    assert cut_out(images.to(memory_format=torch.channels_last), torch.zeros(3, 2).long()).is_contiguous(
        memory_format=torch.channels_last
    )


def test_hole_in_an_oblong_image_has_half_of_its_shorter_side_rounded_up() -> None:
    cut = cut_out(torch.ones(1, 1, 5, 9), torch.tensor([[2, 6]]))
    expected = torch.ones(1, 1, 5, 9)
    expected[0, 0, 1:4, 5:8] = 0  # three of five rows around row 2, as many columns around column 6
    assert torch.equal(cut, expected)


def test_holes_are_anywhere_in_the_image_and_do_not_follow_the_shares() -> None:
    data = se.Data.from_arrays(torch.zeros(400, 3, 4, 10, dtype=torch.uint8), torch.arange(400) % 2)
    changes = changes_for("crop+flip+cutout", 0.4, data, 400, 400, torch.device("cpu"))
    assert changes is not None
    assert changes.holes is not None
    changes.shuffle(7)
    rows, columns = changes.holes[0].T
    assert rows.unique().tolist() == list(range(4))
    assert columns.unique().tolist() == list(range(10))
    # The 400 numbers behind the shares would give these rows; the same numbers twice would tie holes to blends.
    assert not torch.equal(rows, draw((7, 2), 400) % 4)
    assert not torch.equal(rows, draw((7,), 400) % 4)


def test_mixup_blends_each_sample_with_the_next_of_its_member() -> None:
    inputs = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    mixed, targets = mix(inputs, torch.tensor([0, 1, 2, 2, 1, 1]), torch.tensor([0.75] * 3 + [0.5] * 3), 2, 4)
    assert mixed[:, 0, 0, 0].tolist() == [0.25, 1.25, 1.5, 3.5, 4.5, 4.0]  # 0.75 · 2 + 0.25 · 0, …
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert targets.tolist() == [
        [0.75, 0.25, 0, 0], [0, 0.75, 0.25, 0], [0.25, 0, 0.75, 0], [0, 0.5, 0.5, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("mixup", [0.2, 1.0])
def test_shares_follow_the_beta_distribution(mixup: float) -> None:
    shares = draw_shares(mixup, (1, 2), 2000).numpy()
    assert stats.kstest(shares, stats.beta(mixup, mixup).cdf).pvalue > 0.01
    assert np.array_equal(shares, draw_shares(mixup, (1, 2), 2000).numpy())


def test_loss_of_blended_labels_is_the_blend_of_losses() -> None:
    """Also with label smoothing, and for a network with more outputs than there are classes."""
    outputs, labels = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 0])
    _, targets = mix(torch.zeros(5, 1), labels, torch.full((5,), 0.3), 1, 4)
    for smoothing in (0.0, 0.1):
        one, other = (F.cross_entropy(outputs, y, label_smoothing=smoothing) for y in (labels, labels.roll(-1)))
        torch.testing.assert_close(smoothed_cross_entropy(outputs, targets, smoothing), 0.3 * one + 0.7 * other)


def test_stacked_changes_are_those_of_each_member() -> None:
    data = few_digits()
    alone, members = (
        [changes_for("crop+flip+cutout", 0.4, data, 40, 4, torch.device("cpu")) for _ in range(2)] for _ in range(2)
    )
    stacked = stack_changes(members)
    for number in range(2):
        for changes in (alone[number], members[number]):
            changes.shuffle(number)
    images, labels = torch.randn(20, 1, 8, 8), torch.arange(20) % 10
    inputs, targets = stacked.apply(images, labels, 10, torch.tensor([1]))
    for number, rows in enumerate((slice(10), slice(10, 20))):
        expected = alone[number].apply(images[rows], labels[rows], torch.tensor([10]), 1)
        assert torch.equal(inputs[rows], expected[0])
        assert torch.equal(targets[rows], expected[1])
    assert not torch.equal(alone[0].holes, alone[1].holes)
    assert changes_for("crop+flip", 0.0, data, 40, 4, torch.device("cpu")) is None


def test_what_cannot_be_blended_is_an_error() -> None:
    recipe = se.Recipe(epochs=1, mixup=0.2)
    regression = se.Data.from_arrays(torch.randn(20, 3), torch.randn(20))
    with pytest.raises(ValueError, match=r"mixup must be 0 for a regression, .*, not 0.2"):
        se.train(se.Ensemble([se.zoo.mlp(3, 1)]), regression, recipe, quiet=True)
    with pytest.raises(ValueError, match="mixup must be 0 for a loss of your own"):
        se.train(se.Ensemble([se.zoo.lenet5(10)]), few_digits(), recipe, loss=F.cross_entropy, quiet=True)
    labels = torch.arange(20) % 2
    pairs = torch.utils.data.TensorDataset(torch.randn(20, 3), labels)
    others = {
        "Data.from_loaders": se.Data.from_loaders(torch.utils.data.DataLoader(pairs, 10), classes=2),
        "data of several inputs": se.Data.from_arrays((torch.randn(20, 3), torch.randn(20, 3)), labels),
        "inputs that are ids": se.Data.from_arrays(torch.arange(60).view(20, 3), labels, ids=True),
    }
    for reason, data in others.items():
        with pytest.raises(ValueError, match=f"mixup must be 0 for {reason}"):
            check_mixup(0.2, data, has_own_loss=False)
        check_mixup(0.0, data, has_own_loss=False)

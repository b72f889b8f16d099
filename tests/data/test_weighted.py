"""Weights of samples: merging, repeating, and losses that read the weight from the targets."""

import numpy as np
import pytest
import torch

from structured_ensembles.data.weighted import (
    MAX_REPEATED,
    attach_weights,
    merge_equal_rows,
    repeat_whole,
    weighted_cross_entropy,
    weighted_squared_error,
)


def test_equal_rows_become_one_whatever_their_order() -> None:
    inputs = np.array([[1, 2], [3, 4], [1, 2], [1, 2], [5, 6], [0, 1], [-0.0, 1]], dtype=np.float32)
    targets = np.array([0.0, 1, 0, 1, 0, 2, 2])
    weights = np.array([1.0, 2, 3, 4, 0, 5, 0.5])
    expected = {(1, 2, 0): 4.0, (3, 4, 1): 2.0, (1, 2, 1): 4.0, (0, 1, 2): 5.5}
    contents = []
    for order in (np.arange(7), np.array([6, 2, 4, 0, 5, 3, 1])):
        rows, totals = merge_equal_rows(inputs[order], targets[order], weights[order])
        merged = np.column_stack((inputs[order][rows], targets[order][rows]))
        assert {tuple(row): total for row, total in zip(merged.tolist(), totals, strict=True)} == expected
        contents.append(merged + 0.0)
    assert np.array_equal(*contents)


def test_rows_with_equal_inputs_and_other_values_stay_apart() -> None:
    targets = np.array([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])
    rows, totals = merge_equal_rows(np.ones((3, 1), dtype=np.float32), targets, np.ones(3))
    assert sorted(zip(targets[rows, 1], totals, strict=True)) == [(2.0, 2.0), (3.0, 1.0)]


def test_only_whole_weights_repeat_rows() -> None:
    assert repeat_whole(np.array([2.0, 1, 3])).tolist() == [0, 0, 1, 2, 2, 2]
    assert repeat_whole(np.array([2.0, 1.5])).tolist() == [0, 1]
    assert repeat_whole(np.array([2.0, MAX_REPEATED])).tolist() == [0, 1]
    assert repeat_whole(np.array([])).tolist() == []


def test_weighted_losses_equal_those_of_repeated_samples() -> None:
    torch.manual_seed(0)
    labels, weights, repeats = np.array([0, 2, 1]), np.array([1.0, 3, 2]), torch.tensor([1, 3, 2])
    logits = torch.randn(3, 4)
    plain = torch.nn.functional.cross_entropy(
        logits.repeat_interleave(repeats, 0), torch.from_numpy(labels).repeat_interleave(repeats)
    )
    assert weighted_cross_entropy(logits, attach_weights(labels, weights)).item() == pytest.approx(plain.item())

    values, outputs = torch.randn(3, 2), torch.randn(3, 2)
    errors = (outputs - values).repeat_interleave(repeats, 0).square().mean(0)
    expected = (errors[0] / 4 + errors[1]) / 2  # deviations of 2 and 1
    cost = weighted_squared_error(outputs, attach_weights(values.double().numpy(), weights), (2.0, 1.0))
    assert cost.item() == pytest.approx(expected.item())

"""tensors_of(): everything that a captured step may change, from what it works on."""

from typing import Any

import pytest
import torch
from torch import nn

from structured_ensembles.cuda.state import tensors_of


def ids(*things: Any) -> list[int]:
    return [id(tensor) for tensor in tensors_of(*things)]


def test_module_gives_parameters_and_buffers() -> None:
    norm = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    expected = [*norm.parameters(), *norm.buffers()]
    assert ids(norm) == [id(tensor) for tensor in expected]
    assert len(expected) == 7  # weight and bias twice; mean, variance and count


@pytest.mark.parametrize(("kind", "states"), [(torch.optim.SGD, 1), (torch.optim.AdamW, 3)])
def test_optimizer_state_is_included_from_the_first_step_on(kind: Any, states: int) -> None:
    layer, rate = nn.Linear(2, 1), torch.tensor(0.1)
    optimizer = kind(layer.parameters(), lr=rate, **({"momentum": 0.9} if states == 1 else {}))
    before = ids(layer, optimizer)
    assert before == [id(layer.weight), id(layer.bias), id(rate)]  # each once
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    after = ids(layer, optimizer)
    assert after[:3] == before
    states_of_optimizer = [id(tensor) for values in optimizer.state.values() for tensor in values.values()]
    assert after[3:] == states_of_optimizer
    assert len(states_of_optimizer) == 2 * states


def test_lists_and_dicts_are_searched() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert ids({"a": one, "b": [two, None]}, (three, 0.5), two) == [id(one), id(two), id(three)]
    assert ids() == []


def test_unknown_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="things must be modules, optimizers, tensors, or lists and dicts"):
        ids(object())

"""Operations in place become operations that return a new tensor; where memory is shared, the pass says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda.passes import collect_counters, remove_inplace
from structured_ensembles.cuda.program import ProgramError
from tests.support.programs import (
    Model,
    assert_equal,
    check_pass,
    conv,
    images,
    norm,
    operations,
    results_of,
    results_of_network,
    rewritten,
)

Following = Callable[[Tensor], Tensor]


def changed_twice(y: Tensor) -> Tensor:
    y += 1
    y.relu_()
    return y * 2


def read_before_and_after(y: Tensor) -> Tensor:
    before = y * 3
    y.relu_()
    return before + y


def result_and_original(y: Tensor) -> Tensor:
    result = y.relu_()
    return result * 2 + y


def added_and_read(y: Tensor) -> Tensor:
    result = y.add_(3 * y)
    return torch.relu(result) + y


REMOVED: dict[str, Following] = {
    "relu": lambda y: F.relu(y, inplace=True),
    "method": lambda y: y.clamp_(min=0.1),
    "module": nn.Hardtanh(inplace=True),
    "changed twice": changed_twice,
    "read before and after": read_before_and_after,
    "result and original": result_and_original,
    "added and read": added_and_read,
    "scaled": lambda y: y.mul_(2).div_(3),
    "a copy": lambda y: y.clone().relu_() + y,
    "contiguous as it is": lambda y: (y.contiguous().relu_(), y)[1],
}


@pytest.mark.parametrize("name", REMOVED)
def test_results_are_those_in_place(name: str) -> None:
    network = Model(lambda self, x: REMOVED[name](self.c(x)), c=conv())
    printed = check_pass(network, images(), remove_inplace)
    assert not [operation for operation in operations(printed) if operation.endswith("_")]


def test_inputs_may_be_changed_in_place() -> None:
    network = Model(lambda self, x: self.c(x.mul_(2)) + x.mean(), c=conv())
    assert "mul_" not in operations(check_pass(network, images(), remove_inplace))


def test_dropout_in_place_becomes_dropout() -> None:
    network = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True))
    assert operations(check_pass(network, torch.randn(2, 6), remove_inplace)) == ["linear", "dropout", "relu"]


def test_batch_norms_may_update_their_statistics() -> None:
    network = nn.Sequential(conv(), norm(), nn.ReLU(inplace=True))
    printed = check_pass(network, images(), remove_inplace, before=[collect_counters])
    assert operations(printed) == ["conv2d", "batch_norm", "relu"]


def test_views_become_reshapes_as_layouts_may_differ() -> None:
    """The weights of stacked convolutions are stored channels last, and so are their outputs."""
    network = Model(lambda self, x: self.c(x).view(x.shape[0], -1), c=conv())
    program = rewritten(network, images(), remove_inplace)
    assert operations(str(program))[-1] == "reshape"
    assert_equal(results_of(program, [network], [images()])[0], results_of_network(network, images()))


def part_assigned(y: Tensor) -> Tensor:
    y[:, 0] = 1.0
    return y


def view_of_an_earlier_view(y: Tensor) -> Tensor:
    flat = y.flatten(1)
    y.relu_()
    return flat + y.flatten(1)


SHARED: dict[str, Following] = {
    "a view": lambda y: y.view(y.shape[0], -1).relu_(),
    "a view, the whole read": lambda y: (y.flatten(1).relu_(), y)[1],
    "a view made before": view_of_an_earlier_view,
    "a part": lambda y: (y[:, 1:].relu_(), y)[1],
    "a part assigned": part_assigned,
    "a chunk of a chunk": lambda y: (y.select(1, 0).unsqueeze(1).relu_(), y)[1],
    "transposed": lambda y: (y.transpose(1, 2).relu_(), y)[1],
    "reshaped": lambda y: (y.reshape(y.shape[0], -1).relu_(), y)[1],
    "dropout that is off": lambda y: (F.dropout(y, 0.5, training=False).relu_(), y)[1],
    "detached": lambda y: (y.detach().mul_(2), y)[1],
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_is_refused(name: str) -> None:
    network = Model(lambda self, x: SHARED[name](self.c(x)), c=conv())
    with pytest.raises(ProgramError, match="shares its memory with another"):
        rewritten(network, images(), remove_inplace)


def test_a_changed_buffer_is_refused_by_name() -> None:
    network = Model(lambda self, x: (self.seen.mul_(2), self.c(x))[1], c=conv(), seen=torch.ones(()))
    with pytest.raises(ProgramError, match=r"aten.mul_.Tensor changes 'seen' in place"):
        rewritten(network, images(), remove_inplace)


def assigned(self: Any, x: Tensor) -> Tensor:
    self.seen = self.seen + 1
    result: Tensor = self.c(x)
    return result


def test_an_assigned_buffer_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"changes 'seen' in place"):
        rewritten(Model(assigned, c=conv(), seen=torch.ones(())), images(), remove_inplace)


def test_an_operation_without_a_functional_twin_is_refused() -> None:
    network = Model(lambda self, x: self.c(x).normal_(), c=conv())
    with pytest.raises(ProgramError, match="normal_"):
        rewritten(network, images(), remove_inplace)

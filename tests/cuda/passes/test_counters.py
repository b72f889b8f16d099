"""Counters of batches are taken out of the graph, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from structured_ensembles.cuda.passes import collect_counters
from tests.support.programs import Model, check_pass, conv, images, norm, operations, rewritten


def two_norms() -> Model:
    return Model(lambda self, x: self.b(self.c(self.a(x)).relu()), a=norm(3), b=norm(4), c=conv())


def test_the_counters_of_batch_norms_leave_the_graph() -> None:
    printed = check_pass(two_norms(), images(), collect_counters)
    assert operations(printed) == ["batch_norm", "conv2d", "relu", "batch_norm"]
    program = rewritten(two_norms(), images(), collect_counters)
    assert program.counters == ("a.num_batches_tracked", "b.num_batches_tracked")


def test_counters_of_two_passes_add_up() -> None:
    program = rewritten(two_norms(), images(), collect_counters, collect_counters)
    assert program.counters == ("a.num_batches_tracked", "b.num_batches_tracked")


# What else may be done with a counter; each gives a factor of the outputs.
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "by two": lambda seen: (seen.add_(2), 1)[1],
    "with a factor": lambda seen: (seen.add_(1, alpha=2), 1)[1],
    "twice": lambda seen: (seen.add_(1).add_(1), 1)[1],
    "and read": lambda seen: seen.add_(1),
    "and read again": lambda seen: (seen.add_(1), seen)[1],
    "downwards": lambda seen: (seen.sub_(1), 1)[1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_counted_in_another_way_stays(name: str) -> None:
    network = Model(lambda self, x: self.c(x) * OTHERS[name](self.seen), c=conv(), seen=torch.zeros(()))
    program = rewritten(network, images(), collect_counters)
    assert program.counters == ()
    assert {"add_", "sub_"} & set(operations(str(program)))

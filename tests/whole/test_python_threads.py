"""The walk in several threads at once: torch.export patches globals, so that only one may export at a time."""

import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import structured_ensembles as se

DIGITS = se.load_data("digits")
NETWORKS = [se.zoo.mlp(64, hidden=(16 + 4 * number, 12)) for number in range(4)]


def run_in_threads(function: Callable[[int], Any]) -> list[Any]:
    """Call the function with 0 to 3 at once, in a thread each."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, range(4)))


def test_traces_in_threads_find_what_each_finds_alone() -> None:
    networks = [*NETWORKS[:2], se.zoo.lenet5(), se.zoo.resnet20()]
    examples = [torch.zeros(2, 1, 8, 8)] * 2 + [torch.zeros(2, 1, 28, 28), torch.zeros(2, 3, 16, 16)]

    def trace(number: int) -> str:
        return str(se.trace(networks[number], examples[number]))

    alone = [trace(number) for number in range(4)]
    level, stderr = logging.getLogger("torch").level, sys.stderr
    for _ in range(2):
        assert run_in_threads(trace) == alone
    assert logging.getLogger("torch").level == level
    assert sys.stderr is stderr


def test_ensembles_are_built_and_exported_in_threads(tmp_path: Path) -> None:
    recipe = se.Recipe.named("modern", epochs=1, batch_size=256)

    def build(number: int) -> torch.Tensor:
        ensemble = se.structured_ensemble(
            NETWORKS[number], DIGITS, members=2, search_epochs=1, recipe=recipe, seed=number, quiet=True
        )
        se.export_pt2(ensemble, tmp_path / f"{number}.pt2")
        return ensemble.predict_proba(DIGITS.test.inputs)

    alone = [build(number) for number in range(4)]
    for together, expected in zip(run_in_threads(build), alone, strict=True):
        torch.testing.assert_close(together, expected)

"""Exports that are read at once note no lines of code and collect no garbage; settings are as they were before."""

import gc
import logging
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx, nn

from structured_ensembles.channels import trace
from structured_ensembles.common.exports import SETTING, without_garbage_collection, without_stack_traces
from structured_ensembles.cuda.program import export_program
from structured_ensembles.tracing.fake_model import FakeModel


def test_traced_and_compiled_networks_note_no_lines_of_code() -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.zeros(2, 3)
    fake = FakeModel.of(model, (inputs,))
    graphs = [fake.export(fake.model).graph, export_program(model, inputs).graph]
    assert not any(node.stack_trace for graph in graphs for node in graph.nodes)
    usual = torch.export.export(model, (inputs,), strict=False)
    assert any(node.stack_trace for node in usual.graph.nodes)


def fail() -> None:
    assert getattr(fx.config, SETTING)
    raise KeyError


def test_setting_is_restored_after_an_error_and_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), without_stack_traces():
        fail()
    assert not getattr(fx.config, SETTING)
    monkeypatch.delattr(fx.config, SETTING)  # as in an older version
    with without_stack_traces():
        assert not hasattr(fx.config, SETTING)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_a_trace_if_it_was_before(enabled: bool) -> None:
    seen = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.isenabled())
            return super().forward(x)

    if not enabled:
        gc.disable()
    try:
        trace(Watched(3, 2), torch.zeros(2, 3))
        with pytest.raises(ValueError, match="cannot be followed"):
            trace(Watched(3, 2), torch.zeros(2, 4))
        with without_garbage_collection(), without_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen
    assert not any(seen)


def test_threads_trace_one_after_the_other_and_leave_the_process_as_it_was() -> None:
    """`torch.export` fails in two threads at a time, and what they silence would stay silent."""

    def state() -> tuple[object, ...]:
        loggers = [logging.getLogger(name) for name in ("torch", "torch._subclasses.fake_tensor")]
        return sys.stderr, list(warnings.filters), [(logger.level, logger.disabled) for logger in loggers]

    def count_prunable(layers: int) -> int:
        model = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.ReLU())])
        graphs = [trace(model, torch.zeros(2, 8)) for _ in range(3)]
        compiled = export_program(model, torch.zeros(2, 8))
        assert len(compiled.graph.nodes) > layers
        return sum(len(graph.prunable) for graph in graphs)

    before = state()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count_prunable, (3, 7, 5, 4))) == [6, 18, 12, 9]
    assert state() == before

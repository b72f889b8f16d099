"""A step that cannot be captured runs as it is, and the log says so once."""

from collections.abc import Callable

import pytest
import torch

from structured_ensembles.cuda import capture
from structured_ensembles.cuda.capture import CaptureError, captured_if_possible
from structured_ensembles.cuda.state import tensors_of


def test_fallback_is_logged_once_per_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    reasons = iter(["it waits for the device", "it waits for the device", "it draws on the host"])

    def refuse(*_: object, **__: object) -> Callable[[], None]:
        raise CaptureError(next(reasons))

    monkeypatch.setattr(capture, "captured", refuse)
    runs: list[int] = []
    for size in (128, 57, 128):
        step = captured_if_possible(lambda size=size: runs.append(size), torch.device("cpu"), tensors_of, "the search")  # type: ignore[misc]
        step()
    assert runs == [128, 57, 128]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the search goes on without a CUDA graph, slower: it waits for the device"),
        ("WARNING", "the search goes on without a CUDA graph, slower: it draws on the host"),
    ]
    caplog.clear()  # expected, see conftest.py

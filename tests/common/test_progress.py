"""Progress where stderr is not a terminal: a line now and then, nothing if quiet."""

import pytest

from structured_ensembles.common import progress as module
from structured_ensembles.common.progress import progress


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 4))  # every look at the clock is 4 s later than the one before
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    with progress("search", 12) as advance:
        for step in range(12):
            advance(loss=step / 10)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "search 3/12  loss 0.200"
    assert 2 <= len(lines) <= 4


def test_quiet_and_quick_work_show_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("search", 3) as advance:
        advance()
    monkeypatch.setattr(module, "SECONDS", -1)
    with progress("search", 3, quiet=True) as advance:
        advance()
    assert capsys.readouterr().err == ""

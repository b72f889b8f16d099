"""Threads of commands: chosen for the command only, by its options and the size of its work."""

import os
from pathlib import Path

import pytest
import torch

from structured_ensembles.cli import main as command
from structured_ensembles.cli.main import main


def test_a_command_runs_on_the_wanted_threads_and_restores_their_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(root: Path | None = None) -> int:
        print(torch.get_num_threads())
        return 0

    monkeypatch.setitem(command.COMMANDS, "datasets", show)
    before = torch.get_num_threads()
    assert main(["datasets", "--threads", "3"]) == 0
    assert capsys.readouterr().out == "3\n"
    assert torch.get_num_threads() == before
    monkeypatch.setattr(command, "SMALL", (show,))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    try:
        assert main(["datasets"]) == 0
        assert capsys.readouterr().out == "1\n"
        os.environ["OMP_NUM_THREADS"] = "2"  # the user's word is kept
        assert main(["datasets"]) == 0
        assert capsys.readouterr().out == "2\n"
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        torch.set_num_threads(before)

"""Fixtures of the tests of commands."""

from pathlib import Path

import pytest

from structured_ensembles.cli.main import main
from tests.support.command_lines import QUICK


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    assert main(["train", "--out", str(folder), *QUICK]) == 0
    return folder

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from structured_ensembles.files import write_atomically, write_text


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_text(path, "äöü")
    assert path.read_text(encoding="utf-8") == "äöü"

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text(encoding="utf-8") == "äöü"
    assert list(path.parent.iterdir()) == [path]


def test_leftovers_of_killed_processes_are_cleared_and_those_of_others_left_alone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead, alive = (tmp_path / f"file.txt.{platform.node()}-{process}.part" for process in (child.pid, os.getppid()))
    other = tmp_path / "other.txt.part"
    for leftover in (dead, alive, other):
        leftover.write_text("half")
    write_text(tmp_path / "file.txt", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file.txt", alive.name, other.name])

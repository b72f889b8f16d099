"""The wheel has all of the package: an ignored folder would be left out silently."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from structured_ensembles.paper.published import table_names
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def files_in_the_wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build the wheel; return the paths it holds."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_contains_every_module(files_in_the_wheel: set[str]) -> None:
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert modules
    assert modules - files_in_the_wheel == set()


def test_wheel_contains_the_published_tables(files_in_the_wheel: set[str]) -> None:
    assert {Path(name).stem for name in files_in_the_wheel if "/paper/published/" in name} == set(table_names())

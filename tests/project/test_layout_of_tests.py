"""Tests mirror the package: a folder per room, files named after modules, helpers in tests/support."""

import re
from pathlib import Path

from tests.support.paths import ROOT

TESTS, PACKAGE = ROOT / "tests", ROOT / "src" / "structured_ensembles"
ACROSS_ROOMS = {"attack", "project", "whole"}
FILES = sorted(TESTS.rglob("test_*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def room_of(path: Path) -> str:
    """Return the folder below tests/ that a file is in; "" for the root."""
    return path.parent.relative_to(TESTS).as_posix().removeprefix(".")


def modules_of(room: str) -> set[str]:
    """Name the modules and packages of a room; the room itself, too, for tests of all its modules."""
    folder = PACKAGE / room
    packages = {path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    return {path.stem for path in folder.glob("*.py")} | packages | {folder.name}


def imports_of_tests(text: str) -> list[str]:
    """Find the imports of test files in Python code, those in strings included."""
    return re.findall(r"\b(?:from|import)\s+(?:[\w.]+\s+import\s+)?[\w.]*\btest_\w+", text)


def test_no_test_file_imports_another() -> None:
    """Neither in its own code nor in a script that it writes for another process."""
    for example in ("from tests.cuda import %s", "from tests.zoo.%s import f", "import %s"):
        assert imports_of_tests(example % "test_zoo")
    imports_by_file = {name_of(path): imports_of_tests(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {name: imports for name, imports in imports_by_file.items() if imports}


def test_every_folder_of_tests_is_a_room_of_the_package() -> None:
    rooms = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if any(path.glob("*.py"))}
    assert {room_of(path) for path in FILES} - ACROSS_ROOMS - {""} <= rooms


def test_every_test_file_is_named_after_a_module_of_its_room() -> None:
    """`test_fleet_independence.py` tests a side of `fleet.py`, `test_kernels_cuda.py` tests `kernels/` on a GPU."""
    strange = [
        name_of(path)
        for path in FILES
        if room_of(path) not in ACROSS_ROOMS
        and not any(f"{path.stem}_".startswith(f"test_{module}_") for module in modules_of(room_of(path)))
    ]
    assert not strange


def test_the_files_marked_cuda_are_those_named_cuda() -> None:
    marker = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.cuda\b", re.MULTILINE)
    marked = [name_of(path) for path in FILES if marker.search(path.read_text(encoding="utf-8"))]
    assert marked == [name_of(path) for path in FILES if path.stem.endswith("_cuda")]
    assert marked

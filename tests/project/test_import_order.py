"""Rooms import in one direction: each uses only rooms before it, and no two modules import each other in a circle.

A room is a folder of the package, or a module at its root. All imports count: those within functions and under
`if TYPE_CHECKING` too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import structured_ensembles

NAME = "structured_ensembles"
PACKAGE = Path(structured_ensembles.__file__).parent
ARCHITECTURE = PACKAGE.parents[1] / "docs" / "architecture.md"

# The order. A new room or root module goes behind the last one that it uses, and gets a line in docs/architecture.md.
ROOMS = (
    "common", "networks", "zoo", "storage", "data", "examination", "resuming", "calibration", "prediction",
    "tracing", "channels", "cuda",
    "scaling", "diversity", "searching", "search", "saliency", "selection", "extraction", "checking",
    "training", "artifact", "hub", "ensemble", "train", "evaluation", "export", "build", "methods", "estimators",
    "runs", "continual", "paper", "report", "cli",
    "__init__", "__main__",
)  # fmt: skip


class Import(NamedTuple):
    """One import: which module, in which line of which file, imports which other; names without the package's."""

    importer: str
    imported: str
    place: str  # such as "search.py:12"

    def __str__(self) -> str:
        return f"{self.place}: {self.importer} imports {self.imported}"


def modules_of(package: Path) -> dict[str, Path]:
    """Find the modules of a package by name: "data.splits", "data" for data/__init__.py, "__init__" for its own."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"] = path
    return modules


def imports_of(package: Path) -> list[Import]:
    """List all imports of one module of the package by another, wherever they stand."""
    modules = modules_of(package)
    imports = []
    for importer, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path.relative_to(package)}:{getattr(node, 'lineno', 0)}"
            imports += [Import(importer, imported, place) for imported in _imported(node, importer, path, modules)]
    return imports


def _imported(node: ast.AST, importer: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        targets = [(alias.name, "") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # relative: one dot is the module's own folder
            folders = [NAME, *importer.split(".")] if importer != "__init__" else [NAME]
            if path.name != "__init__.py":
                folders.pop()
            base = ".".join([*folders[: len(folders) - node.level + 1], *([base] if base else [])])
        targets = [(base, alias.name) for alias in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
        targets = [(str(argument.value), "") for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    else:
        return
    for base, name in targets:
        if base == NAME or base.startswith(f"{NAME}."):
            module = base.removeprefix(NAME).removeprefix(".")
            inner = f"{module}.{name}".strip(".")  # `from package import x`: x may be a module, or a name in it
            yield inner if inner in modules else module or "__init__"


def room_of(module: str) -> str:
    """Return the room of a module."""
    return module.partition(".")[0]


def against_the_order(imports: list[Import], rooms: tuple[str, ...]) -> list[str]:
    """Return a sentence on each import of a room that comes later in the order."""
    place = {room: number for number, room in enumerate(rooms)}
    return [
        f"{statement}, but the room {room_of(statement.imported)!r} comes after {room_of(statement.importer)!r}"
        for statement in imports
        if place[room_of(statement.imported)] > place[room_of(statement.importer)]
    ]


def circle(imports: list[Import]) -> list[Import]:
    """Find modules that import each other in a circle: the imports along it; an empty list if there is none."""
    following: dict[str, list[Import]] = {}
    for statement in imports:
        following.setdefault(statement.importer, []).append(statement)
    finished: set[str] = set()

    def search(module: str, path: list[Import]) -> list[Import]:
        for statement in following.get(module, []):
            passed = [step.importer for step in path] + [module]
            if statement.imported in passed:
                return [*path, statement][passed.index(statement.imported) :]
            if statement.imported not in finished and (cycle := search(statement.imported, [*path, statement])):
                return cycle
        finished.add(module)
        return []

    return next((cycle for module in following if (cycle := search(module, []))), [])


REMEDY = (
    "Move what is needed to an earlier room, hand it in as an argument, or let the later room make the call. "
    "ROOMS in this file is the order, docs/architecture.md explains it."
)


def test_every_room_stands_in_the_order_once() -> None:
    rooms = {room_of(module) for module in modules_of(PACKAGE)}
    assert sorted(ROOMS) == sorted(rooms), "ROOMS must name every folder and root module once, and nothing else"


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """List the imports of the package, whose whole code is parsed for it."""
    return imports_of(PACKAGE)


def test_a_room_imports_only_rooms_before_it(imports: list[Import]) -> None:
    wrong = against_the_order(imports, ROOMS)
    assert not wrong, "\n".join([*wrong, REMEDY])


def test_no_modules_import_each_other_in_a_circle(imports: list[Import]) -> None:
    wrong = circle(imports)
    assert not wrong, "\n".join(["these imports form a circle:", *map(str, wrong), REMEDY])


def test_the_architecture_names_every_room() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    folders = {room for room in ROOMS if (PACKAGE / room).is_dir()}
    missing = [name for room in ROOMS if f"`{(name := f'{room}/' if room in folders else f'{room}.py')}`" not in text]
    assert not missing, f"docs/architecture.md must say in one line what each of these is for: {', '.join(missing)}"


@pytest.mark.parametrize(
    "late",
    [
        "import structured_ensembles.late",
        "from structured_ensembles import late",
        "from structured_ensembles.late.inner import x",
        "from ..late import inner",
        "def f():\n    from structured_ensembles.late import inner",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from structured_ensembles.late import inner",
        'from importlib import import_module\ninner = import_module("structured_ensembles.late.inner")',
    ],
)
def test_an_import_of_a_later_room_is_found_however_it_is_written(late: str, tmp_path: Path) -> None:
    _write(
        tmp_path, {"__init__": "", "early/__init__": "", "early/a": late, "late/__init__": "", "late/inner": "x = 1"}
    )
    (message,) = against_the_order(imports_of(tmp_path), ("early", "late", "__init__"))
    assert message.startswith(f"early/a.py:{late.count(chr(10)) + 1}: early.a imports late")
    assert not against_the_order(imports_of(tmp_path), ("late", "early", "__init__"))


def test_a_circle_is_found_and_shown_in_its_order(tmp_path: Path) -> None:
    planted = {
        "a": "from .b import x",
        "b": "from structured_ensembles.c import x",
        "c": "def f():\n    from . import a",
    }
    _write(tmp_path, {**planted, "outside": "from .a import x"})
    cycle = circle(imports_of(tmp_path))
    assert [(statement.importer, statement.imported) for statement in cycle] == [("a", "b"), ("b", "c"), ("c", "a")]
    (tmp_path / "c.py").write_text("x = 1")
    assert circle(imports_of(tmp_path)) == []


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

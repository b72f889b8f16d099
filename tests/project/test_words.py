"""Names say what kind of thing they hold, and the first line of a function's docstring has a verb."""

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.support.paths import ROOT

FOLDERS = ("src", "benchmarks", "tools")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
# Names that held anything at all, or that only their author understood.
VAGUE = {
    *("own", "found", "part", "given", "odd", "rise", "most", "take"),
    *("pending", "eights", "halves", "faster", "ghost", "unnoticed"),
}
NO_VERBS = {
    "A", "All", "Also", "An", "As", "By", "Each", "Every", "For", "How", "If", "In", "It", "Its", "No", "Not", "Of",
    "On", "One", "That", "The", "Their", "These", "This", "Those", "To", "What", "When", "Where", "Whether", "While",
    "With",
}  # fmt: skip


def name_of(node: ast.AST) -> str | None:
    """Return the name that a node gives to a variable, an argument, an attribute, a function or a class."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def vague_names(code: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that give something a vague name, and the names."""
    for node in ast.walk(ast.parse(code)):
        name = name_of(node)
        if name is not None and name.lstrip("_") in VAGUE:
            yield node.lineno, name  # type: ignore[attr-defined]


def headless_docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Yield the functions whose docstring begins without a verb, with its first line."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            first_line = (ast.get_docstring(node) or "Return").splitlines()[0]
            first_word = first_line.split()[0]
            if first_word in NO_VERBS or not first_word[0].isupper():
                yield node.lineno, first_line


def listed(check: Callable[[str], Iterator[tuple[int, str]]]) -> list[str]:
    """List what a check finds in all files."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        for line, text in check(path.read_text(encoding="utf-8"))
    ]


def test_names_say_what_they_hold() -> None:
    assert len(FILES) > 200
    assert listed(vague_names) == []


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    assert listed(headless_docstrings) == []


@pytest.mark.parametrize(
    "code", ["own = 1", "def f(found): ...", "for part in (): ...", "class C:\n    def take(self): ...", "a.given = 2"]
)
def test_a_vague_name_is_found_wherever_it_is_given(code: str) -> None:
    assert len(list(vague_names(code))) == 1
    assert list(vague_names("owned = own.found(part)")) == []


@pytest.mark.parametrize("text", ["What is left.", "(members, batch)", "16 MiB for each stream.", "Whether it fits."])
def test_a_docstring_without_a_verb_is_found(text: str) -> None:
    assert list(headless_docstrings(f'def f():\n    """{text}"""')) == [(1, text)]
    assert list(headless_docstrings('def f():\n    """Return what is left."""\ndef g(): ...')) == []

"""Convert the package's docstrings, plain text with `code` and "name: meaning" lines, to reStructuredText."""

import re
from collections.abc import Iterator

CODE = re.compile(r"`([^`\n]+)`")
ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*): \S")
MARKUP = re.compile(r"([*|\\]|_(?=\W|$))")


def convert_docstring(app: object, kind: str, name: str, documented: object, options: object, lines: list[str]) -> None:
    """Replace the lines of a docstring in place; Sphinx calls this for every object that autodoc reads."""
    lines[:] = to_restructured_text(lines)


def to_restructured_text(lines: list[str]) -> list[str]:
    """Return reStructuredText: entries become a list, indented paragraphs literal blocks, backquotes code."""
    converted: list[str] = []
    for paragraph in split_paragraphs(lines):
        indented = all(line.startswith("    ") for line in paragraph)
        is_doctest = paragraph[0].startswith(">>> ")
        if indented or is_doctest:
            converted += ["::", "", *(line if indented else f"    {line}" for line in paragraph), ""]
            continue
        for start, text in join_lines(paragraph):
            converted += [start + escape(text)] if start else [escape(text)]
        converted.append("")
    return converted


def split_paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of each paragraph; empty lines separate them."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def join_lines(paragraph: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (marker, text) for each entry or bullet of a paragraph; other lines continue the one before."""
    marker, text = "", ""
    for line in paragraph:
        entry = ENTRY.match(line)
        bullet = line.startswith("- ")
        if not entry and not bullet:
            text = f"{text} {line.strip()}".strip()
            continue
        if text:
            yield marker, text
            if not marker:
                yield "", ""  # an empty line between a text and a list
        marker = f"* **{entry['names']}**: " if entry else "* "
        text = line.removeprefix("- ") if bullet else line[entry.end("names") + 2 :] if entry else line
    yield marker, text


def escape(text: str) -> str:
    """Double the backquotes of code, and escape what reStructuredText would take for markup elsewhere."""
    parts = CODE.split(text)  # text, code, text, …
    return "".join(f"``{part}``" if number % 2 else MARKUP.sub(r"\\\1", part) for number, part in enumerate(parts))

"""The README is short, says how to begin, and its links and those of the docs lead somewhere."""

import re
from pathlib import Path

import pytest

from structured_ensembles.report.docs.write import BLOCK
from tests.support.paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
GENERATED = ("_build", "auto_gallery")  # by `make docs`, not in a checkout
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if not set(GENERATED) & set(path.parts)),
]
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
CODE = re.compile(r"^[ ]*```.*?^[ ]*```[ ]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors_of(text: str) -> set[str]:
    """Name the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """List the links of a page to files or headings that do not exist; those into the built gallery are left out."""
    broken = []
    for match in LINK.finditer(CODE.sub("", text)):
        target = (page.parent / match["path"]).resolve() if match["path"] else page
        if any(name in target.parts for name in GENERATED):
            continue
        anchor = match["anchor"]
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
            broken.append(match[0])
    return broken


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) < 120


@pytest.mark.parametrize("command", ["pip install structured-ensembles", "sens demo", "make demo", "make test"])
def test_readme_says_how_to_begin(command: str) -> None:
    assert command in TEXT[: TEXT.index("## ")]


def test_readme_states_no_measured_number_by_hand() -> None:
    """Tables and percentages are generated or in pages whose numbers are tested: see test_docs_numbers.py."""
    outside = BLOCK.sub("", CODE.sub("", TEXT))
    assert not re.findall(r"\d[\d.,]* ?(?:%|ms\b|MiB|s\b|×|points)", outside)
    assert "|---" not in outside


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, with `code`\n\n```sh\n# no heading\n```\n")
    text = (
        "[a](page.md#a-title-with-) [b](missing.md) [c](page.md#no-heading) `[d](missing.md)` [e](https://example.org)"
    )
    assert broken_links(page, text) == ["](missing.md)", "](page.md#no-heading)"]

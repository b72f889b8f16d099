"""The glossary is sorted, one sentence per term, and explains only words that the project uses."""

import re

import pytest

from tests.support.paths import ROOT

ENTRY = re.compile(r"- \*\*(?P<term>[^*]+)\*\*: (?P<sentence>.+)")
GLOSSARY = ROOT / "docs" / "glossary.md"
LINES = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("- ")]
ENTRIES = {match["term"]: match["sentence"] for line in LINES if (match := ENTRY.fullmatch(line))}
SOURCES = [
    *(ROOT / "src" / "structured_ensembles").rglob("*.py"),
    *(path for path in (ROOT / "docs").rglob("*.md") if path != GLOSSARY),
    ROOT / "README.md",
]


@pytest.fixture(scope="module")
def used_words() -> str:
    """Return code and docs in lower case, where identifiers read as words."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    return re.sub(r"[\s_-]+", " ", text).lower()


def occurs(term: str, text: str) -> bool:
    """Tell whether a term, or its plural, stands in the text as words."""
    return re.search(rf"\b{re.escape(re.sub('[ -]', ' ', term.lower()))}s?\b", text) is not None


def test_every_entry_is_one_sentence() -> None:
    assert len(ENTRIES) == len(LINES) > 50  # every line is an entry, and no term has two
    wrong = [term for term, sentence in ENTRIES.items() if not sentence.endswith(".") or ". " in sentence]
    assert not wrong


def test_terms_are_sorted() -> None:
    assert list(ENTRIES) == sorted(ENTRIES, key=str.lower)


def test_every_term_is_used_in_code_or_docs(used_words: str) -> None:
    assert not occurs("flux capacitor", used_words)
    unused = [term for term in ENTRIES if not occurs(term, used_words)]
    assert not unused


def test_newcomers_find_the_glossary() -> None:
    assert "(glossary.md)" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text(encoding="utf-8")

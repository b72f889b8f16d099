"""Tables in Markdown, and escaping, so that it shows text from files literally."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from structured_ensembles.common.tables import escape_control_characters

ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is no markup
LINKS = re.compile(r":(?=//)|(?<=www)\.|@(?=[^\W\d])", re.IGNORECASE)  # GitHub turns bare addresses into links


def escape_markdown(text: str) -> str:
    """Escape any text so that it cannot make markup, HTML, a link, a table cell or a second line.

    Control characters, which could act on a terminal or hide text, are written out.
    """
    line = escape_control_characters(" ".join(text.split()))
    line = "".join(ENTITIES.get(character, character) for character in line)
    line = MARKUP.sub(lambda match: "\\" + match[0], line)
    return LINKS.sub(lambda match: f"&#{ord(match[0])};", line)


def write_table(header: Sequence[str], lines: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """Write a Markdown table, whose cells are escaped already; right: the columns aligned to the right."""
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))

"""Text from files in Markdown, shown as it is."""

from __future__ import annotations

import re

from structured_ensembles.common.tables import printable

ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word marks nothing
LINKS = re.compile(r":(?=//)|(?<=www)\.|@(?=[^\W\d])", re.IGNORECASE)  # GitHub makes links of bare addresses


def literal(text: str) -> str:
    """Write any text so that no markup, HTML, link, table cell or second line comes of it.

    Control characters, which might act on a terminal or hide what is written, are spelled out.
    """
    line = printable(" ".join(text.split()))
    line = "".join(ENTITIES.get(own, own) for own in line)
    line = MARKUP.sub(lambda found: "\\" + found[0], line)
    return LINKS.sub(lambda found: f"&#{ord(found[0])};", line)

"""Render formulas as MathML, which browsers show without JavaScript: the pages work offline."""

import re

from docutils import nodes
from latex2mathml.converter import convert as latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

ALIGNED = re.compile(r"\\begin{aligned}(.*)\\end{aligned}", re.DOTALL)


def setup(app: Sphinx) -> dict[str, bool]:
    """Offer the renderer; conf.py chooses it."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_inline(page: HTML5Translator, node: nodes.math) -> None:
    """Write a formula within a line."""
    page.body.append(convert(node, as_block=False))
    raise nodes.SkipNode


def write_block(page: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula of its own, which scrolls where it is too wide."""
    page.body.append(f'<div class="formula">{convert(node, as_block=True)}</div>')
    raise nodes.SkipNode


def convert(node: nodes.math | nodes.math_block, as_block: bool) -> str:
    """Return the MathML of a formula; one with an unknown command is a warning, and so an error of `make docs`."""
    formula = node.astext().strip()
    aligned = ALIGNED.fullmatch(formula)
    result = convert_rows(aligned[1]) if aligned else latex2mathml(formula, display="block" if as_block else "inline")
    if "\\" in result:  # latex2mathml passes on what it does not know
        logging.getLogger(__name__).warning("unknown command in the formula %s", formula, location=node)
    return result


def convert_rows(formula: str) -> str:
    """Convert the inside of an `aligned` environment, which latex2mathml lacks: a table of formulas."""
    rows = [[latex2mathml(cell) for cell in row.split("&")] for row in re.split(r"\\\\", formula) if row.strip()]
    aligned = (
        "".join(
            f'<td style="text-align: {side}">{cell}</td>' for cell, side in zip(row, ("right", "left"), strict=False)
        )
        for row in rows
    )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in aligned)}</table>"

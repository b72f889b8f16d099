"""Find the Python code of a Markdown page and run it in one namespace, with trainings cut short.

Three kinds of code, which CONTRIBUTING.md ("Documentation") describes to authors:

- a fence ```python is shown and run;
- a comment <!-- test … --> is run at its place and not shown: what a reader would have already, or a check;
- a fence ```python notest: needs … is shown, must compile, and is not run, for the reason given.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from structured_ensembles import search
from structured_ensembles.training import Recipe

MAX_EPOCHS, MAX_SEARCH_EPOCHS = 2, 1
PYTHON = re.compile(
    r"^(?P<indent>[ ]*)```python(?P<note>[^\n]*)\n(?P<fence>.*?)^[ ]*```[ ]*$|^<!-- test\n(?P<hidden>.*?)^-->[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Code of a page. line: of its first line, from 1. reason: why it is not run; "" for code that is."""

    line: int
    code: str
    reason: str = ""


def python_blocks(text: str) -> list[Block]:
    """List the Python code of a page in its order; an unknown note after ```python is a ValueError."""
    blocks = []
    for match in PYTHON.finditer(text):
        note = (match["note"] or "").strip()
        if note and not re.fullmatch(r"notest: needs \S.*", note):
            raise ValueError(f"```python may be followed by 'notest: needs …', not by {note!r}")
        name = "hidden" if match["fence"] is None else "fence"
        indent = match["indent"] or ""
        code = "".join(line.removeprefix(indent) for line in match[name].splitlines(keepends=True))
        blocks.append(Block(text.count("\n", 0, match.start(name)) + 1, code, note.removeprefix("notest: ")))
    return blocks


def compile_block(block: Block, page: Path) -> Any:
    """Compile code such that tracebacks show the page and its line."""
    return compile("\n" * (block.line - 1) + block.code, str(page), "exec")


def run_page(page: Path) -> int:
    """Run the blocks of a page in one namespace, in the working directory; return how many were run."""
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = [block for block in python_blocks(page.read_text(encoding="utf-8")) if not block.reason]
    for block in blocks:
        exec(compile_block(block, page), namespace)
    return len(blocks)


@contextmanager
def short_trainings() -> Iterator[None]:
    """Let every recipe train for two epochs at most and every search for one, whatever a page says."""
    check, learn_scales = Recipe.__post_init__, search.learn_scales

    def check_and_shorten(recipe: Recipe) -> None:
        check(recipe)
        object.__setattr__(recipe, "epochs", min(recipe.epochs, MAX_EPOCHS))

    def learn_scales_briefly(*arguments: Any, epochs: int = MAX_SEARCH_EPOCHS, **keywords: Any) -> Any:
        return learn_scales(*arguments, epochs=min(epochs, MAX_SEARCH_EPOCHS), **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "__post_init__", check_and_shorten)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "structured_ensembles" and vars(module).get("learn_scales") is learn_scales:
                patch.setattr(module, "learn_scales", learn_scales_briefly)
        yield

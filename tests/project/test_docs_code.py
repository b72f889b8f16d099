"""The Python code of README and docs runs: all blocks of a page in one namespace, with trainings cut short."""

from collections.abc import Callable
from pathlib import Path

import pytest

import structured_ensembles as se
from structured_ensembles import build
from structured_ensembles.continual import structured as continual_structured
from tests.support.code_blocks import Block, compile_block, python_blocks, run_page, short_trainings
from tests.support.paths import ROOT

PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts),
]
BLOCKS = {page: python_blocks(page.read_text(encoding="utf-8")) for page in PAGES}
WITH_CODE = [page for page, blocks in BLOCKS.items() if any(not block.reason for block in blocks)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with short_trainings():
        assert run_page(page) > 0


def test_blocks_that_are_not_run_compile_and_are_few(record_property: Callable[[str, object], None]) -> None:
    """One in six of those that are run, at most: they need a cluster, several GPUs or an account."""
    unrun = {page: [block for block in blocks if block.reason] for page, blocks in BLOCKS.items()}
    for page, blocks in unrun.items():
        for block in blocks:
            compile_block(block, page)
    listed = [f"{name_of(page)}:{block.line} {block.reason}" for page, blocks in unrun.items() for block in blocks]
    record_property("figures", f"code of the docs that is not run: {'; '.join(listed) or 'none'}")
    assert 6 * len(listed) <= sum(map(len, BLOCKS.values())) - len(listed), listed


def test_blocks_are_found_with_their_lines_and_reasons() -> None:
    text = (
        "# Title\n\n<!-- test\nx = 1\n-->\n\n```python\ny = x\n\nz = y\n```\n\n- item\n\n  ```python\n  if z:\n"
        "      z = 2\n  ```\n\n```sh\nls\n```\n```python notest: needs a cluster\nsubmit()\n```\n"
    )
    assert python_blocks(text) == [
        Block(4, "x = 1\n"),
        Block(8, "y = x\n\nz = y\n"),
        Block(16, "if z:\n    z = 2\n"),
        Block(24, "submit()\n", "needs a cluster"),
    ]
    with pytest.raises(ValueError, match="not by 'skip'"):
        python_blocks("```python skip\n```\n")


def test_errors_name_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n<!-- test\nvalue = 1\n-->\n\n```python\nassert value == 1\nvalue / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as error:
        run_page(page)
    assert (Path(error.traceback[-1].path), error.traceback[-1].lineno + 1) == (page, 9)


def test_trainings_of_pages_are_short() -> None:
    data, model = se.load_data("digits"), se.zoo.mlp(64)
    graph = se.trace(model, data.example())
    with short_trainings():
        assert se.Recipe().epochs == se.Recipe.named("paper").epochs == 2
        assert se.Recipe(epochs=1).epochs == 1
        assert se.continual.NaiveLearner(se.zoo.lenet5_backbone()).recipe.epochs == 2
        assert len(se.learn_scales(model, graph, data, 2, epochs=3, quiet=True).history) == 1
        assert build.learn_scales is continual_structured.learn_scales is se.learn_scales
    assert se.Recipe().epochs == 60
    assert len(se.learn_scales(model, graph, data, 2, epochs=3, quiet=True).history) == 3

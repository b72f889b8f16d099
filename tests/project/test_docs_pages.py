"""The documentation builds strictly, documents every public name, and its gallery and command lines work."""

import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot

import structured_ensembles as se
from structured_ensembles.cli.main import COMMANDS, main
from tests.support.code_blocks import short_trainings
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
BUILT = ("_build", "auto_gallery")
SCRIPTS = sorted((DOCS / "gallery").glob("plot_*.py"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for path in sorted(DOCS.rglob("*.md")) if not set(BUILT) & set(path.parts)),
]
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sens_commands() -> list[str]:
    """List the command lines of `sens` in README and docs, without those that name code of the reader's."""
    lines = [line for page in PAGES for block in SHELL.findall(page.read_text("utf-8")) for line in block.splitlines()]
    named = re.compile(r"^sens (?!.*\b\w+:(?:function|load|net)\b)")
    return sorted({line for line in lines if named.match(line)})


def test_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    """Build a copy with `make docs`' options, except that gallery scripts are not run."""
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns(*BUILT))
    for path in ROOT.iterdir():
        if path.suffix == ".md" or path.name in ("benchmarks", "results"):
            (tmp_path / path.name).symlink_to(path)
    options = ["-W", "--keep-going", "-q", "-D", "plot_gallery=0", "-b", "html"]
    assert f"-m sphinx {' '.join(options[:2])}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", *options, "docs", "html"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    for page in (tmp_path / "docs").rglob("*.md"):
        assert (tmp_path / "html" / page.relative_to(tmp_path / "docs")).with_suffix(".html").exists()
    for page in (tmp_path / "html").rglob("*.html"):  # nothing of a built page comes from the network
        assert not re.findall(r'<(?:script|link|img)[^>]*"https?:[^"]*"', page.read_text(encoding="utf-8")), page


def test_api_pages_document_every_public_name_once() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    documented = re.findall(r"^\.\. auto\w+:: structured_ensembles\.([\w.]+)$", text, re.MULTILINE)
    modules = {name for name in se.__all__ if inspect.ismodule(getattr(se, name))}
    public = {name for name in se.__all__ if name not in modules}
    public |= {f"{module}.{name}" for module in modules for name in getattr(se, module).__all__}
    public -= {"evaluate"}  # is evaluation.evaluate
    assert sorted(documented) == sorted(public)


def test_api_pages_call_exceptions_what_is_one() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    for name in re.findall(r"^\.\. autoexception:: structured_ensembles\.([\w.]+)$", text, re.MULTILINE):
        assert issubclass(attrgetter(name)(se), BaseException), name


def test_pages_claim_nothing_that_results_call_open() -> None:
    """And are written in English: it is nine times out of ten."""
    words = {page.name: " ".join(page.read_text(encoding="utf-8").split()) for page in [*PAGES, *SCRIPTS]}
    if "Nothing recorded says yet how two full networks compare with five halves" in words["results.md"]:
        assert not [name for name, text in words.items() if re.search("two full networks beat", text, re.IGNORECASE)]
    assert not [name for name, text in words.items() if re.search(r"\btimes of ten\b", text)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_gallery_script_runs_and_draws(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` runs the whole scripts; here their trainings are short."""
    monkeypatch.chdir(tmp_path)
    shown = 0

    def count_figures() -> None:
        nonlocal shown
        shown += len(pyplot.get_fignums())
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", count_figures)
    pyplot.switch_backend("agg")
    with short_trainings():
        runpy.run_path(str(script), run_name="__main__")
    assert shown == script.read_text(encoding="utf-8").count("plt.subplots(") > 0


def record_options(function: Callable[..., int], calls: list[dict[str, Any]]) -> Callable[..., int]:
    """Return a function with the options of a command that only records them."""

    @wraps(function)
    def record(**options: Any) -> int:
        calls.append(options)
        return 0

    return record


@pytest.mark.parametrize("line", sens_commands())
def test_command_line_in_the_docs_is_understood(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []
    for name, function in COMMANDS.items():
        monkeypatch.setitem(COMMANDS, name, record_options(function, calls))
    assert main(shlex.split(line, comments=True)[1:]) == 0, capsys.readouterr().err
    assert len(calls) == 1


def test_wrong_command_lines_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(sens_commands()) > 10
    monkeypatch.setitem(COMMANDS, "demo", record_options(COMMANDS["demo"], []))
    try:
        code = main(["demo", "--no-such-option", "3"])
    except SystemExit as error:  # how a parser ends
        code = int(error.code or 0)
    assert code != 0


def test_docstrings_become_restructured_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from docstrings import to_restructured_text

    docstring = (
        "Cut `n` of 2*n.\n\nText of\ntwo lines.\nmembers, seed: how\n    many: all.\nmemory: x_ |y|\n\n    code(*x)\n"
    )
    assert "\n".join(to_restructured_text(docstring.splitlines())) == (
        "Cut ``n`` of 2\\*n.\n\nText of two lines.\n\n* **members, seed**: how many: all.\n* **memory**: x\\_ \\|y\\|\n"
        "\n::\n\n    code(*x)\n"
    )
    sys.modules.pop("docstrings")


def test_formulas_become_mathml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from docutils import nodes
    from mathml import convert

    formula = convert(
        nodes.math_block(text="\\begin{aligned} a &= \\big(b\\big) \\\\ c &= d \\end{aligned}"), as_block=True
    )
    assert (formula.count("<tr>"), formula.count("<td")) == (2, 4)
    assert "<msqrt>" in convert(nodes.math(text="\\sqrt{n}"), as_block=False)
    half = convert(nodes.math(text="\\tfrac12 M"), as_block=False)
    assert "<mfrac><mn>1</mn><mn>2</mn></mfrac>" in half
    fraction = ElementTree.fromstring(convert(nodes.math(text="\\frac{f\\big(x\\big)}{y}"), as_block=False))
    numerator, denominator = fraction.findall(".//{*}mfrac/*")
    assert ("".join(numerator.itertext()), "".join(denominator.itertext())) == ("f(x)", "y")
    sys.modules.pop("mathml")

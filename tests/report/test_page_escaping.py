"""Reports of untrusted run folders: text from files is shown literally and has no effect."""

import json
import re
import shutil
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from structured_ensembles.cli.main import main
from structured_ensembles.common.markdown import escape_markdown
from structured_ensembles.paper.layout import markdown_table

NASTY = [
    "a|b|c",
    "`rm -rf`",
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "[click](https://evil.example)",
    "![p](https://evil.example/p.png)",
    "https://evil.example www.evil.example me@evil.example",
    "one\ntwo\n\n# three\r\n| a |\x0b\u2028x",
    "**bold** _it_ ~~gone~~ $x$ $\\frac$",
    "\x1b[31mred\x07 \u202eback",
    "../../../../outside",
    "{{ 7 * 7 }} {% raw %}",
    "&lt;b&gt; &amp; \\",
    "long " * 200,
    "\x00",
]


def shown_by_markdown(text: str) -> str:
    """Undo escapes as a renderer of Markdown does."""
    text = re.sub(r"\\([!-/:-@\[-`{-~])", lambda match: f"&#{ord(match[1])};", text)
    text = re.sub(r"&#(\d+);", lambda match: chr(int(match[1])), text)
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


@given(st.text() | st.sampled_from(NASTY))
def test_literal_makes_one_line_of_plain_markdown(text: str) -> None:
    escaped = escape_markdown(text)
    assert len(escaped.splitlines()) <= 1
    assert escaped.isprintable() or not escaped
    bare = re.sub(r"\\[!-/:-@\[-`{-~]", " ", escaped)  # what is left after escapes
    assert not re.search(r"[`*\[\]|<>~$]|://|www\.|(^|[\W_])_|_($|[\W_])|@[A-Za-z]", bare)
    assert not re.search(r"&(?!(amp|lt|gt|#\d+);)", bare)
    if text.isprintable():
        assert shown_by_markdown(escaped) == " ".join(text.split())


def test_ordinary_names_are_not_escaped() -> None:
    for name in (
        "structured, prune=0.7",
        "batch-ensemble",
        "cifar10/resnet20",
        "my_package:my_data",
        "accuracy (%)",
    ):
        assert escape_markdown(name) == name


@pytest.mark.parametrize("name", NASTY)
def test_cell_text_cannot_add_cells(name: str) -> None:
    text = markdown_table([name, "b"], ["x"], {"x": "cls/accuracy"}, {(name, "x"): [0.5]})
    lines = text.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3


@pytest.mark.parametrize("values", [[0.5, float("nan")], [float("inf"), 0.5]])
def test_table_shows_nan_and_inf(values: list[float]) -> None:
    text = markdown_table(["a"], ["x"], {"x": "cal/nll"}, {("a", "x"): values})
    assert text.splitlines()[-1] in ("| a | nan |", "| a | inf |")


class Page(HTMLParser):
    """Collect the tags, attributes and scripts of a page, and its texts outside of figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.inside += [tag] if tag in ("script", "svg") else []
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        (self.scripts if "script" in self.inside else [] if "svg" in self.inside else self.texts).append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train a run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    quick = ["--epochs", "1", "--quiet"]
    train = ["train", "--out", str(folder / "train"), "--model", "mlp", "--members", "2", *quick]
    assert main(train) == 0
    assert main(["continual", "--out", str(folder / "continual"), "--method", "naive", "--tasks", "2", *quick]) == 0
    return {"train": folder / "train", "continual": folder / "continual"}


def forged(run: Path, where: Path, text: str, **figures: Any) -> Path:
    """Copy a run folder and put a text into every field that takes one."""
    shutil.copytree(run, where)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {"dataset": text, "model": text, "method": text, "method_arguments": {text: text, "prune": text}}
    (where / "config.yaml").write_text(yaml.safe_dump(config))
    result = json.loads((run / "result.json").read_text())
    result |= dict.fromkeys(("device", "precision", "date", "engine"), text)
    result |= {"versions": {"torch": text}, "epochs": text}
    del result["sha256"]
    (where / "result.json").write_text(json.dumps(result))
    return where


@pytest.mark.parametrize("kind", ["train", "continual"])
def test_report_escapes_names_from_files(
    kind: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deep" / "down"
    texts = [" ".join(NASTY[first : first + 4]) for first in range(0, len(NASTY), 4)]
    folders = [forged(runs[kind], folder / f"run{number}", text) for number, text in enumerate(texts)]
    outside = set(tmp_path.rglob("*"))
    out = folder / "report"
    assert main(["report", *map(str, folders), "--out", str(out), "--measure", "false"]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", shown)
    new = set(tmp_path.rglob("*")) - outside
    assert all(out in (path, *path.parents) for path in new)
    plain = Page((out / "report.html").read_text(encoding="utf-8"))
    assert not plain.tags & {"img", "a", "iframe", "b"}
    assert plain.scripts == [files("structured_ensembles.report.web").joinpath("page.js").read_text(encoding="utf-8")]
    assert not {name for name in plain.attributes if name.startswith("on")} | ({"src"} & plain.attributes)
    assert any("<script>alert(1)</script>" in text for text in plain.texts)
    assert not any(text.strip() == "49" for text in plain.texts)  # nothing is computed in the page
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", "".join(plain.texts))  # no text is hidden or turned round
    markdown = (out / "report.md").read_text(encoding="utf-8")
    for link in re.findall(r"(?<!\\)\]\(([^)]*)\)", markdown):
        assert re.fullmatch(r"figures/[A-Za-z0-9._=+,-]+\.svg", link)
        assert (out / link).exists()
    lines = [line for line in markdown.splitlines() if line and not line.startswith(("|", "!["))]
    assert all(line.startswith("#") or line.endswith(".") for line in lines)  # no line but ours
    bare = re.sub(r"\\.", "", re.sub(r"!\[[^\n]*", "", markdown)).replace("**", "")
    assert not re.search(r"[<>`\[\]]|://", bare)


def test_continual_report_writes_one_figure_per_method_name(runs: dict[str, Path], tmp_path: Path) -> None:
    names = ["my method", "my*method"]
    folders = []
    for number, name in enumerate(names):
        folders.append(tmp_path / f"run{number}")
        shutil.copytree(runs["continual"], folders[-1])
        config = yaml.safe_load((folders[-1] / "config.yaml").read_text())
        (folders[-1] / "config.yaml").write_text(yaml.safe_dump(config | {"method": name}))
    assert main(["report", *map(str, folders), "--out", str(tmp_path / "report")]) == 0
    figures = list((tmp_path / "report" / "figures").glob("*matrix*.svg"))
    assert len(figures) == len(names)

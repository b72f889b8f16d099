"""Reports of any runs: of both kinds at once, and of those whose weights are not there."""

import re
from pathlib import Path

import pytest

from structured_ensembles.cli.main import main
from tests.support.paths import ROOT


def test_report_compares_runs_of_both_kinds_without_their_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = next((ROOT / "results" / "cifar10-resnet20").glob("*-single-*"))
    continual = next((ROOT / "results" / "split-mnist").glob("*-structured-*"))
    assert main(["report", str(trained), str(continual), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{trained} has no ensemble.safetensors" in shown
    assert "2 runs, mean" in shown
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    charts = re.findall(r'data-name="([^"]*)"', page)
    assert {"learning", "matrix", "capacity"} <= set(charts)
    lead = re.findall(r"<p>(.*?)</p>", page.partition('class="lead"')[2].partition("</div>")[0])
    assert [line.split(",")[0] for line in lead] == ["On cifar10/resnet20", "On mnist/lenet5"]
    assert "<summary>2 runs</summary>" in page
    assert main(["report", str(continual), "--out", str(tmp_path / "one")]) == 0
    page = (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
    assert "<summary>1 run</summary>" in page
    assert "<h1>Report of a run</h1>" in page


def test_report_of_an_unfinished_run_says_only_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = next((ROOT / "results" / "cifar10-resnet20").glob("*-single-*"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is not done yet" in captured.err

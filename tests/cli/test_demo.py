"""`sens demo`: its report, and the ensembles that it shows."""

import re
from pathlib import Path

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.data.digits import read_digits


def test_demo_refuses_invalid_options_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "-1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "epochs must be a whole number" in captured.err


def test_demo_writes_a_report_with_the_figures_of_its_ensembles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path), "--epochs", "1"]) == 0
    printed = capsys.readouterr()
    assert "structured ensemble of 5" in printed.out
    assert "counts as not trained" not in printed.out + printed.err  # nobody would ask for networks of new weights
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count('class="sample"') == 24  # twelve discarded and twelve kept
    for name in ("front-parameters", "reliability", "coverage", "discarding", "entropy", "kept"):
        assert page.count(f'data-name="{name}"') == 1, name
    assert "Five networks cut out of one" in page
    assert not re.search(r"https?://|//[a-z]", page.replace("// ", ""))  # nothing is loaded from elsewhere
    data = read_digits(test_share=1 / 2, validation_share=1 / 3)
    loaded = {name: se.Ensemble.load(tmp_path / f"{name}.safetensors") for name in ("single", "deep", "structured")}
    figures = {name: se.evaluate(ensemble, data) for name, ensemble in loaded.items()}
    rows = re.findall(r'<tr[^>]*><th scope="row"[^>]*>([^<]*)</th>(.*?)</tr>', page)
    shown = {name: re.findall(r'data-value="([^"]*)"', cells) for name, cells in rows}
    titles = {"single": "one network", "deep": "deep ensemble of 5", "structured": "structured ensemble of 5"}
    for method, ensemble_figures in figures.items():  # before and after temperature, and the sets, of every method
        names = ("cls/accuracy", "cal/ece", "cal/ece_t", "cal/nll", "cal/nll_t", "conf/coverage", "conf/size")
        expected = [ensemble_figures[name] for name in names]
        assert [float(value) for value in shown[titles[method]][:7]] == pytest.approx(expected)
    assert figures["structured"]["cal/ece_t"] <= figures["single"]["cal/ece"]
    single, structured = (se.Ensemble.load(tmp_path / f"{name}.safetensors") for name in ("single", "structured-int8"))
    assert (tmp_path / "structured-int8.safetensors").stat().st_size < (tmp_path / "single.safetensors").stat().st_size
    assert (len(single), len(structured)) == (1, 5)
    assert torch.isfinite(structured(torch.rand(2, 1, 8, 8))).all()

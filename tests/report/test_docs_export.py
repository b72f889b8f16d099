"""docs/export.md: the page equals the records, and its sentences follow from them."""

import json
from typing import Any

import pytest

from structured_ensembles.report.docs.export import CHECKS, PAGE, RECORD, SINGLE, WAYS, render_export
from tests.support.paths import ROOT


def records() -> tuple[dict[str, Any], dict[str, Any]]:
    one, other = (json.loads((ROOT / path).read_text(encoding="utf-8")) for path in (RECORD, CHECKS))
    return one, other


def row_of(ensemble: str, way: str, milliseconds: float) -> dict[str, Any]:
    """Make a row of a base network "net" with this time at batch 64."""
    times = {"1": {"min": 1.0, "median": 2.0}, "64": {"min": milliseconds, "median": 2 * milliseconds}}
    shared = {"base": "net", "memory": 0.95, "computation": 1.1, "bytes": 2_500_000}
    return {**shared, "ensemble": ensemble, "way": way, "milliseconds": times}


def test_the_page_equals_the_records() -> None:
    record, checks = records()
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == render_export(record, checks), "run `python benchmarks/export.py --docs`"


def test_every_model_of_the_zoo_and_five_of_torchvision_were_compared() -> None:
    from structured_ensembles import zoo

    rows = {row["model"]: row for row in records()[1]["rows"]}
    assert set(zoo.__all__) == {name for name in rows if "/" not in name}
    assert sum(name.startswith("torchvision/") for name in rows) >= 5
    for row in rows.values():
        assert max(row[way]["difference"] for way in ("onnx", "pt2")) < 1e-4
        assert (
            0.001 < row["onnx"]["spread"] < 0.46
        )  # probabilities neither alike nor all 0 and 1: those agree too easily


@pytest.mark.parametrize(
    ("milliseconds", "told"), [(90.0, "is not slower"), (100.0, "is not slower"), (109.0, "is slower")]
)
def test_the_verdict_follows_from_the_times(milliseconds: float, told: str) -> None:
    rows = [row_of(SINGLE, way, 100.0) for way in WAYS]
    rows += [row_of("memory=1", way, milliseconds if way == "ONNX" else 130.0) for way in WAYS]
    record, checks = records()
    page = render_export({**record, "rows": rows}, checks)
    assert f"at batch 64 it {told} than the one network in ONNX Runtime, {milliseconds / 100:.2f} times" in page
    assert "in PyTorch 1.30 times." in page
    assert f"|  |  |  | ONNX | 2.50 | 1.0 | {milliseconds:.0f} | {milliseconds / 100:.2f} |" in page

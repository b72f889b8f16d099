"""docs/models.md: the page equals the record, and says what the rows say."""

import copy
import json
import re
from typing import Any

import pytest

from structured_ensembles.report.docs.models import PAGE, RECORD, render_models
from tests.support.paths import ROOT

EXACT, WRONG = ({"relative": value, "effect": 0.5, "exact": value < 1e-9} for value in (1e-16, 0.02))
CUT = {
    "error": None, "seconds": 1.25, "peak_megabytes": 500.4, "groups": 8, "prunable": 7, "parameters": 1000,
    "left": 300, "ways": ["layers", "residual sums"], "evaluation": EXACT, "training": EXACT, "random": False,
    "reasons": {}, "cut": True, "exact": True,
}  # fmt: skip
PRUNED = {"parameters": 1000, "built": True, "runs": True, "left": 250, **WRONG}


def record_of(**rows: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Make a record with models of timm, each with our row and Torch-Pruning's."""
    versions = dict.fromkeys(("torch", "torchvision", "timm", "transformers", "torch-pruning"), "1.0")
    settings = {"seconds": 60, "gigabytes": 12, "megabytes_of_libraries": 400.0, "versions": versions}
    listed = {
        f"timm/{name}": {
            **{"library": "timm", "family": "F", "ours": ours, "torch_pruning": peer},
            "everything": {"left": 200, "parameters": 1000} if "ways" in ours else {"error": "E"},
        }
        for name, (ours, peer) in rows.items()
    }
    return {"settings": settings, "date": "2026-11-18", "rows": listed}


def cells(page: str, first: str) -> list[str]:
    """Return the cells of the row that has this text in its first or second cell."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return next(line for line in lines if first in line[:2])


def test_the_page_equals_the_record() -> None:
    recorded = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == render_models(recorded), "run `python benchmarks/models.py --docs`"
    assert cells(page, "models")[-1] == str(len(recorded["rows"]))
    assert page.count("\n| ") > len(recorded["rows"])


def test_a_row_says_what_was_measured() -> None:
    page = render_models(record_of(net=(CUT, PRUNED)))
    assert cells(page, "net") == [
        *("F", "net", "1.2", "500", "7/8", "30%", "layers and residual sums", "1e-16", "1e-16", "20%"),
        "25%, **2e-02**",
    ]


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        ({"error": "took more than 60 s"}, "took more than 60 s"),
        ({"parameters": 1000, "built": False, "runs": False, "error": "E"}, "no graph"),
        ({"parameters": 1000, "built": True, "runs": False, "error": "E"}, "pruning fails"),
        ({"parameters": 1000, "built": True, "runs": False, "left": 250, "error": "E"}, "pruned model fails"),
        ({**PRUNED, "left": 1000}, "nothing pruned"),
        ({**PRUNED, **EXACT}, "25%, 1e-16"),
    ],
)
def test_how_far_torch_pruning_gets(peer: dict[str, Any], told: str) -> None:
    assert cells(render_models(record_of(net=(CUT, peer))), "net")[-1] == told


def test_the_summary_counts_what_is_exact() -> None:
    inexact = {**CUT, "training": WRONG, "exact": False}
    layers_only = {**CUT, "ways": ["layers"]}
    uncut = {**CUT, "left": 1000, "cut": False, "exact": False, "ways": [], "evaluation": None, "training": None}
    failed = {"error": "took more than 60 s <b>"}
    unpruned = {**PRUNED, **EXACT, "left": 1000}
    page = render_models(
        record_of(
            a=(CUT, PRUNED),
            b=(inexact, PRUNED | EXACT),
            c=(layers_only, unpruned),
            d=(uncut, PRUNED),
            e=(failed, failed),
        )
    )
    counted = {row: cells(page, row)[-1] for row in ("models", "traced", "cut", "cut, residual sums too")}
    assert counted == {"models": "5", "traced": "4", "cut": "3", "cut, residual sums too": "2"}
    assert cells(page, "**cut exactly**")[-1] == "2"
    assert cells(page, "cut, but not exactly")[-1] == "1"
    assert cells(page, "it prunes, and the pruned model runs")[-1] == "3"
    assert cells(page, "**the pruned model is exact** (evaluation mode)")[-1] == "1"
    assert cells(page, "parameters left where we cut exactly, median")[1:] == ["–", "30%", "–", "30%"]
    assert cells(page, "parameters left with everything on (not exact), median")[1:] == ["–", "20%", "–", "20%"]
    assert (cells(page, "d")[9], cells(page, "e")[9]) == ("20%", "fails")
    assert cells(page, "b")[8] == "**2e-02**"
    assert re.search(r"- `e`: took more than 60 s &lt;b&gt;", page)


def test_random_training_is_said() -> None:
    random = copy.deepcopy(CUT) | {"random": True}
    assert cells(render_models(record_of(net=(random, PRUNED))), "net")[8] == "random"

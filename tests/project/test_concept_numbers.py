"""Measured numbers on the pages of docs/concepts equal those of recorded runs."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from tests.support.paths import ROOT


def page(name: str) -> str:
    """Return the text of a page with single spaces, wherever its lines break."""
    return " ".join((ROOT / "docs" / "concepts" / f"{name}.md").read_text(encoding="utf-8").split())


def record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def digits_runs(arm: str, figure: str, unit: float = 1.0) -> list[float]:
    """Return a figure of the five runs of an arm of benchmarks/selection.py."""
    rows = record("selection-h200")["runs"][arm]
    assert len(rows) == 5
    return [unit * row[figure] for row in rows]


def test_selections_on_digits_are_recorded() -> None:
    text = page("selection")
    for title, arm in (
        ("learned, as in the paper", "paper"),
        ("random", "random"),
        ("one full network", "one network"),
    ):
        accuracies = [digits_runs(arm, f"cls/{name}", 100) for name in ("accuracy", "member_accuracy")]
        cells = [mean_and_deviation(values, 2) for values in accuracies]
        cells.append(mean_and_deviation(digits_runs(arm, "cal/nll"), 3))
        cells.append("–" if arm == "one network" else f"{statistics.mean(digits_runs(arm, 'overlap')):.3f}")
        assert f"| {title} | {' | '.join(cells)} |" in text
    pairs = zip(digits_runs("paper", "cls/accuracy"), digits_runs("random", "cls/accuracy"), strict=True)
    images = [round(359 * (learned - random)) for learned, random in pairs]
    assert set(images) == {1, 2}
    assert "ahead in all five seeds, by one or two of the 359 test images each" in text
    assert record("selection-h200")["epochs"] == 20
    assert "20 epochs, five seeds" in text


def test_penalties_on_digits_are_recorded() -> None:
    text = page("diversity")
    titles = {
        "paper": '`"mmd"`',
        "overlap": '`"overlap"`',
        "no penalty": "none",
        "random": "none, neurons drawn by lot",
    }
    for arm, title in titles.items():
        overlap = mean_and_deviation(digits_runs(arm, "overlap"), 3)
        accuracy = mean_and_deviation(digits_runs(arm, "cls/accuracy", 100), 2)
        assert f"| {title} | {overlap} | {accuracy} |" in text


def test_placements_on_digits_are_recorded() -> None:
    output, norm = (mean_and_deviation(digits_runs(arm, "cls/accuracy", 100), 2) for arm in ("paper", "norm"))
    assert f"an accuracy of {output} % at the output and {norm} % at the norm" in page("scales")


def test_costs_of_the_search_are_recorded() -> None:
    gpu, cpu = (record(f"search-{device}")["rows"] for device in ("h200", "cpu"))
    steps = [rows["search step (mmd)"]["ratio"] for rows in (gpu, cpu)]
    expected = f"costs {steps[0]:.2f} of a plain eager training step on an H200 and {steps[1]:.2f} on two CPU cores"
    assert expected in page("scales")
    scoring = [rows["saliency of a batch"]["ratio"] for rows in (gpu, cpu)]
    assert f"a batch takes {scoring[0]:.2f} times a plain eager training step on an H200" in page("saliency")
    assert f"and {scoring[1]:.2f} times on two CPU cores" in page("saliency")
    times = [rows["search step (overlap)"]["ms"] / rows["search step (mmd)"]["ms"] for rows in (gpu, cpu)]
    expected = (
        f'takes {times[0]:.1f} times as long as one with `"mmd"` on an H200, {times[1]:.1f} times on two CPU cores'
    )
    assert expected in page("diversity")


def test_own_and_shared_batches_are_recorded() -> None:
    def nll(arm: str, batches: str) -> str:
        rows = [row for row in record("batches-h200")["rows"] if row["arm"] == arm and row["batches"] == batches]
        values = [row["figures"]["cal/nll"] for row in rows if row["seed"] in (0, 1, 2)]
        assert len(values) == 3
        return f"{statistics.mean(values):.3f}"

    deep, halves = ([nll(f"{arm}-modern", kind) for kind in ("own", "shared")] for arm in ("deep", "structured"))
    expected = f"NLL {' and '.join(deep)} for four full networks, {' and '.join(halves)} for five halves"
    assert expected in page("training")


def test_times_of_training_and_prediction_are_recorded() -> None:
    steps = {row["name"]: row["ms"] for row in record("fleet-programs-h200")["rows"]}
    ours, eager = steps["ours, graph"], steps["one full network, eager"]
    assert f"takes {ours:.1f} ms on an H200, one full ResNet20 in plain PyTorch {eager:.1f} ms" in page("training")
    predictions = {row["name"]: row["ms"] for row in record("predict-h200")["rows"] if row["batch"] == 1}
    ours, eager = predictions["our ensemble"], predictions["eager loop over the members"]
    expected = f"{ours:.2f} ms for one image with five members, where an eager loop takes {eager:.1f} ms"
    assert expected in page("prediction")

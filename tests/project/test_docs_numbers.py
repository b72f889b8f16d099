"""Numbers in the pages of the docs equal those of recorded runs."""

import json
import math
import statistics
import tomllib
from itertools import product
from typing import Any

import pytest

import structured_ensembles as se
from tests.support.paths import ROOT


def read_page(name: str) -> str:
    """Return the words of a page in one line."""
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


SPEED, TASKS, GUARANTEES = map(read_page, ("speed.md", "learning-tasks.md", "guarantees.md"))


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def test_training_step_table_is_recorded() -> None:
    rows = {row["name"]: row for row in recorded("fleet-programs-h200")}
    names = {
        "eager loop over the networks (what everybody does)": "eager loop",
        "`torch.func.vmap`": "vmap",
        "grouped convolutions": "grouped",
        "**ours**": "ours, graph",
        "one full ResNet20 in plain PyTorch": "one full network, eager",
    }
    for title, name in names.items():
        cells = [f"{rows[name]['ms']:.1f}", f"{rows[name]['MiB']:.0f}"]
        shown = [f"**{cell}**" for cell in cells] if "ours" in name else cells
        assert f"| {title} | {' | '.join(shown)} |" in SPEED
    assert f"on a machine starts {rows['ours, graph']['start']:.0f} s later" in SPEED


def test_promised_speeds_are_recorded_or_said_to_be_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speed

    rows = {row["name"]: row for row in recorded("speed-h200")}
    for line in (line for row in speed.ROWS for line in row.lines):
        numbers = ["–" if value is None else f"{value:.2f} {line.unit}" for value in (line.before, line.aim)]
        measured = rows[line.name]["measured"] if line.name in rows else None
        verdict = "" if line.aim is None or measured is None else "reached" if measured <= line.aim else "missed"
        shown = "not measured" if measured is None else f"{measured:.2f} {line.unit}"
        assert f"| {line.name} | {' | '.join(numbers)} | {shown} | {verdict} |".replace("  ", " ") in SPEED
    four = rows["four ResNet18 in the memory of one"]
    assert f"take {four['ms']:.2f} ms a step, the one {four['ways'][0]['ms']:.2f} ms" in SPEED
    for name, text in (("BatchEnsemble", "a step of BatchEnsemble takes"), ("MC-Dropout", "one of MC-Dropout")):
        (eager,) = rows[f"{name}, a step"]["ways"]
        assert f"{text} {eager['ms']:.1f} ms" in SPEED


def test_memory_of_training_is_recorded_with_its_verdict() -> None:
    rows = [row for row in recorded("speed-h200") if row.get("MiB_before")]
    assert len(rows) == 5
    for row in rows:
        verdict = "no more than before" if row["MiB"] <= row["MiB_before"] else "more than before"
        assert f"| {row['name']} | {int(row['MiB_before']):,} | {int(row['MiB']):,} | {verdict} |" in SPEED


def test_figures_of_taught_members_are_recorded() -> None:
    rows, page = recorded("teaching-cpu"), read_page("how-to/teacher.md")
    best = se.Teacher(se.zoo.mlp(4))
    how = f"taught, share {best.share:g}, temperature {best.temperature:g}"

    def values(name: str, figure: str, split: str = "test") -> list[float]:
        of_seeds = [row[split][figure] for row in rows if row["name"] == name]
        assert len(of_seeds) == 3
        return of_seeds

    shown = {"one network": "one network", "random": "random ×4", "deep": "deep ×4, the teacher"}
    shown |= {f"one network, {how}": "one network, taught", f"random, {how}": "random ×4, taught"}
    for name, title in shown.items():
        memory = statistics.mean(values(name, "size/parameters")) / values("one network", "size/parameters")[0]
        cells = [f"{memory:.2f}"]
        for figure, factor, digits in (
            ("cls/accuracy", 100, 2), ("cal/nll", 1, 4), ("cal/nll_t", 1, 4), ("cal/ece15", 100, 2)
        ):  # fmt: skip
            scaled = [factor * value for value in values(name, figure)]
            cells.append(f"{statistics.mean(scaled):.{digits}f} ± {statistics.stdev(scaled):.{digits}f}")
        assert f"| {title} | {' | '.join(cells)} |" in page
    for members, split in product(("random", "one network"), ("validation", "test")):  # validation chose the defaults
        costs = {
            name: statistics.mean(values(name, "cal/nll", split))
            for name in {row["name"] for row in rows}
            if name.startswith(f"{members}, taught")
        }
        assert len(costs) == 9
        assert min(costs, key=lambda name: costs[name]) == f"{members}, {how}"

    def seconds(start: str) -> str:
        return f"{statistics.mean(row['seconds'] for row in rows if row['name'].startswith(start)):.0f} s"

    trained = statistics.mean(row["seconds"] for row in rows if row["name"] == "random")
    taught = f"members took {trained:.0f} s untaught and {seconds('random, taught')} taught, and the teacher"
    assert f"{taught} {seconds('deep')}" in page.replace("\n", " ")


def test_continual_table_is_recorded() -> None:
    printed = (ROOT / "src/structured_ensembles/paper/published/continual-accuracy.toml").read_text(encoding="utf-8")
    published = tomllib.loads(printed)["rows"]
    titles = {
        "naive": "naive: one network, trained on",
        "single": "single: a network for each task",
        "supsup": "SupSup",
        "batch-ensemble": "BatchEnsemble",
        "pruning": "Pruning",
        "structured": "**structured**",
    }
    means: dict[tuple[str, str], float] = {}
    sizes = {}
    for method, title in titles.items():
        cells = []
        for column, record in enumerate(("continual-split-mnist-cpu", "continual-split-cifar10-h200")):
            values = [100 * row["figures"]["accuracy"] for row in recorded(record) if f"-{method}-" in row["run"]]
            assert len(values) == 3
            means[method, record] = statistics.mean(values)
            ours = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
            bold = f"**{ours}**" if method == "structured" else ours
            cells.append(f"{bold} ({published[method][column][0]:.2f})")
        memory = next(row["memory"] for row in recorded("continual-split-mnist-cpu") if f"-{method}-" in row["run"])
        sizes[method] = memory["bytes_without_heads"] - 4 * memory["backbone"]
        size = f"**{sizes[method]:,}**" if method == "structured" else f"{sizes[method]:,}"
        assert f"| {title} | {cells[0]} | {cells[1]} | {size} |" in TASKS
    gaps = []
    for record in ("continual-split-cifar10-h200", "continual-split-mnist-cpu"):
        by_method = {
            method: {
                row["run"][-1]: row["figures"]["accuracy"] for row in recorded(record) if f"-{method}-" in row["run"]
            }
            for method in ("structured", "supsup")
        }
        paired = [100 * (by_method["structured"][seed] - by_method["supsup"][seed]) for seed in "012"]
        gaps.append((abs(statistics.mean(paired)), statistics.stdev(paired) / math.sqrt(3)))
    assert "On Split-CIFAR-10 it is {:.2f} ± {:.2f} points ahead of SupSup".format(*gaps[0]) in TASKS
    assert "SupSup is not beaten: it is {:.2f} ± {:.2f} points ahead".format(*gaps[1]) in TASKS
    assert means["supsup", "continual-split-mnist-cpu"] > means["structured", "continual-split-mnist-cpu"]
    later = {
        path.parent.name.removeprefix("continual-mnist-5t-lenet5-"): json.loads(path.read_text(encoding="utf-8"))
        for path in (ROOT / "results" / "split-mnist").glob("*/result.json")
    }
    lead = [
        100 * (later[f"supsup-epochs=10-{seed}"]["figures"]["accuracy"])
        - 100 * later[f"structured-epochs=10-{seed}"]["figures"]["accuracy"]
        for seed in "012"
    ]
    assert 0 < statistics.mean(lead) < statistics.stdev(lead) / math.sqrt(3)
    assert f"with {round(sizes['supsup'] / sizes['structured'], -2):.0f} times the masks" in TASKS
    minutes = sum(row["seconds"] for row in recorded("continual-split-mnist-cpu")) / 60
    assert f"{minutes / 2:.0f} minutes on two CPU cores" in TASKS


def test_run_figures_are_recorded() -> None:
    run = recorded("paper_run-h200")
    seconds, figures = run["seconds"], run["figures"]
    assert f"takes {seconds['training']:.0f} s there, the search {seconds['search']:.0f} s" in SPEED
    assert f"the saliency {seconds['saliency']:.1f} s" in SPEED
    assert f"{100 * figures['cls/accuracy']:.1f} % and an ECE of {100 * figures['cal/ece']:.1f} %" in SPEED
    vgg, wide = (
        {row["name"]: row["ms"] for row in recorded(name) if row["members"] == 5}
        for name in ("fleet-vgg11-h200", "fleet-resnet32-h200")
    )
    one = "one full network, eager"
    assert f"VGG11s take {vgg['ours, graph']:.1f} ms, one full VGG11 in plain PyTorch {vgg[one]:.1f} ms" in SPEED
    assert f"64×64 images {wide['ours, graph']:.1f} ms, one full ResNet32 {wide[one]:.1f} ms" in SPEED
    times = {(row["name"], row["batch"]): row["ms"] for row in recorded("predict-h200")}
    ours, loop = "our ensemble", "eager loop over the members"
    assert f"{times[ours, 1]:.2f} ms for one image with five members, {times[loop, 1]:.1f} ms in an eager loop" in SPEED
    assert f"{times[ours, 512]:.1f} ms for 512 images, {times[loop, 512]:.1f} ms in the loop" in SPEED


def test_cpu_times_are_recorded() -> None:
    times = {(row["model"], row["name"]): row["ms"] for row in recorded("fleet-cpu") if row["members"] == 5}
    for model in ("resnet20", "vgg11"):
        together, apart, eager = (times[model, name] for name in ("ours, loop", "ours, loop, one by one", "eager loop"))
        assert f"s {together:,.0f} and {apart:,.0f} ms" in SPEED
        assert f"({eager:,.0f} ms" in SPEED
        assert together < 1.03 * apart  # what turns leave of this machine's changes of speed


def test_memory_figures_are_recorded() -> None:
    rows = {row["name"]: row for row in recorded("fleet-programs-h200")}
    together, two, alone = (rows[f"ours, graph{which}"] for which in ("", ", 2 streams", ", 1 stream"))
    assert f"two members at a time, in {two['MiB']:.0f} MiB, at {two['ms']:.1f} ms for five" in SPEED
    assert f"in the same graph, in {alone['MiB']:.0f} MiB, at {alone['ms']:.1f} ms for five" in SPEED
    before = {row["name"]: row for row in recorded("fleet-h200") if row["members"] == 5}
    assert together["MiB"] <= before["ours, graph"]["MiB"]
    assert alone["allocated_MiB"] <= 1.3 * rows["ours, loop"]["allocated_MiB"]


def test_programs_are_faster_than_what_was_before() -> None:
    """Both recorded on the same GPU, with batches of each member's own."""
    before = {(row["name"], row["members"]): row["ms"] for row in recorded("fleet-own-batches-h200")}
    rows = {row["name"]: row["ms"] for row in recorded("fleet-programs-h200")}
    assert rows["ours, graph"] < 0.75 * before["ours, graph", 5]


def test_accuracy_of_own_and_shared_batches_is_recorded() -> None:
    means: dict[tuple[str, str, str], str] = {}
    for arm in ("deep-modern", "deep-paper", "structured-modern"):
        for batches in ("own", "shared"):
            figures = [
                row["figures"]
                for row in recorded("batches-h200")
                if row["arm"] == arm and row["batches"] == batches and row["seed"] in (0, 1, 2)
            ]
            assert len(figures) == 3
            means[arm, batches, "nll"] = f"{statistics.mean(own['cal/nll'] for own in figures):.3f}".removeprefix("0")
            means[arm, batches, "accuracy"] = f"{100 * statistics.mean(own['cls/accuracy'] for own in figures):.1f}"

    def both(arm: str, figure: str) -> str:
        return f"{means[arm, 'own', figure]} and {means[arm, 'shared', figure]}"

    assert (
        f"an NLL of {both('deep-modern', 'nll')} (deep ×4, `modern`), {both('deep-paper', 'nll')} (deep ×4,"
        in GUARANTEES
    )
    assert f"`paper`), {both('structured-modern', 'nll')} (structured ×5, `modern`)" in GUARANTEES
    listed = ", ".join(f"{both(arm, 'accuracy')} %" for arm in ("deep-modern", "deep-paper", "structured-modern"))
    assert f"accuracies of {listed}: no clear difference" in GUARANTEES


def test_recorded_times_grow_linearly() -> None:
    """Through the origin in images, within 10 % of a line in members, constant in pruning."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for row in recorded("scale-h200"):
        by_kind.setdefault(row["what"], []).append((row["x"], row.get("epoch_s", row["ms"])))
    per_image = [seconds / images for images, seconds in by_kind["samples"]]
    assert max(per_image) < 1.02 * min(per_image)
    members, times = zip(*by_kind["members"], strict=True)
    slope, start = statistics.linear_regression(members, times)
    assert all(abs(start + slope * x - ms) < 0.1 * ms for x, ms in by_kind["members"] if x > 2)
    assert max(ms for _, ms in by_kind["prune"]) < 1.15 * min(ms for _, ms in by_kind["prune"])


def test_attack_counts_are_recorded() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "attack-cpu.json").read_text(encoding="utf-8"))
    for part in record.values():
        assert part["total"]["different"] == part["total"]["other"] == 0
    theirs = ("options.yaml", "picture")  # which we read, but do not write
    files = {name: row for name, row in record["files"]["rows"].items() if name not in theirs}
    assert f"{sum(row['cases'] for row in files.values()):,} damaged and forged files" in GUARANTEES
    seconds, size = (max(row[name] for row in files.values()) for name in ("seconds", "MiB"))
    assert f"none took more than {math.ceil(seconds)} s or {math.ceil(size / 10) * 10} MiB" in GUARANTEES
    assert f"{record['kills']['total']['cases']} runs that were killed" in GUARANTEES
    assert f"of {record['races']['total']['cases']} pairs of processes" in GUARANTEES


def test_what_bfloat16_changes_in_a_search_is_recorded() -> None:
    rows = recorded("search-precision-cpu")
    kept, by_order = (
        f"{100 * statistics.mean(row[name] for row in rows):.1f} %"
        for name in ("kept_differently", "kept_differently_by_order")
    )
    page = read_page("concepts/scales.md")
    assert len(rows) == 2
    assert f"keep {kept} other neurons than in float32, and {by_order} others" in page

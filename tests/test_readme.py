"""The figures in the README are those of recorded runs."""

import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEXT = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def test_the_table_of_training_steps() -> None:
    rows = {(row["name"], row["members"]): row["ms"] for row in recorded("fleet-h200")}
    names = {
        "eager loop over the networks (what everybody does)": "eager loop",
        "`torch.func.vmap`": "vmap",
        "grouped convolutions": "grouped",
        "**ours**": "ours, graph",
    }
    for title, name in names.items():
        cells = [f"{rows[name, members]:.1f}" for members in (1, 5, 15)]
        shown = [f"**{cell}**" for cell in cells] if "ours" in name else cells
        assert f"| {title} | {' | '.join(shown)} |" in TEXT
    ones = [f"{rows['one full network, eager', members]:.1f}" for members in (1, 5, 15)]
    assert f"measured beside each | {' | '.join(ones)} |" in TEXT


def test_the_table_of_continual_learners() -> None:
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
    means, sizes = {}, {}
    for method, title in titles.items():
        runs = [row for row in recorded("continual-split-mnist-cpu") if f"-{method}-" in row["run"]]
        values = [100 * row["figures"]["accuracy"] for row in runs]
        extra = runs[0]["memory"]["bytes_without_heads"] - 4 * runs[0]["memory"]["backbone"]
        cells = [f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}", f"{extra:,}"]
        ours, size = (f"**{cell}**" for cell in cells) if method == "structured" else cells
        assert len(values) == 3
        assert f"| {title} | {ours} | {published[method][0][0]:.2f} | {size} |" in TEXT
        means[method], sizes[method] = statistics.mean(values), extra
    assert f"it is {means['supsup'] - means['structured']:.2f} points ahead" in TEXT
    assert f"with {round(sizes['supsup'] / sizes['structured'], -2):.0f} times the masks" in TEXT
    minutes = sum(row["seconds"] for row in recorded("continual-split-mnist-cpu")) / 60
    assert f"{minutes / 2:.0f} minutes on two CPU cores" in TEXT


def test_the_sentences_about_runs() -> None:
    run = recorded("paper_run-h200")
    seconds, figures = run["seconds"], run["figures"]
    assert f"takes {seconds['training']:.0f} s there, the search {seconds['search']:.0f} s" in TEXT
    assert f"the saliency {seconds['saliency']:.1f} s" in TEXT
    assert f"{100 * figures['cls/accuracy']:.1f} % and an ECE of {100 * figures['cal/ece']:.1f} %" in TEXT
    resnet, vgg = (
        {row["name"]: row["ms"] for row in recorded(name) if row["members"] == 5}
        for name in ("fleet-h200", "fleet-vgg11-h200")
    )
    assert f"at {resnet['ours, graph, 1 stream']:.1f} ms for five" in TEXT
    assert f"VGG11s take {vgg['ours, graph']:.1f} ms, one full VGG11 in plain PyTorch" in TEXT
    assert f"{vgg['one full network, eager']:.1f} ms ([fleet-vgg11" in TEXT
    latency = {row["name"]: row["ms"] for row in recorded("predict-h200") if row["batch"] == 1}
    assert f"{latency['our ensemble']:.2f} ms for one image" in TEXT
    assert f"{latency['eager loop over the members']:.1f} ms in an eager loop" in TEXT

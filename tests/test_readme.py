"""The figures in the README are those of recorded runs."""

import json
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
    one = f"{rows['one full network, eager', 1]:.1f}"
    assert f"for comparison | {one} | {one} | {one} |" in TEXT


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

"""The figures in the README are those of recorded runs."""

import json
import re
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
    run, memory = (
        recorded("paper_run-h200"),
        {row["name"]: row.get("MiB") for row in recorded("fleet-h200") if row["members"] == 5},
    )
    seconds, figures = run["seconds"], run["figures"]
    assert f"takes {seconds['training']:.0f} s there, the search {seconds['search']:.0f} s" in TEXT
    assert f"the saliency {seconds['saliency']:.1f} s" in TEXT
    assert f"{100 * figures['cls/accuracy']:.1f} % and an ECE of {100 * figures['cal/ece']:.1f} %" in TEXT
    more, less = re.search(r"(\d+) MiB instead of (\d+)", TEXT).groups()
    assert abs(int(more) - memory["ours, graph"]) < 5
    assert abs(int(less) - memory["ours, loop"]) < 5
    latency = {row["name"]: row["ms"] for row in recorded("predict-h200") if row["batch"] == 1}
    assert f"{latency['our ensemble']:.2f} ms for one image" in TEXT
    assert f"{latency['eager loop over the members']:.1f} ms in an eager loop" in TEXT

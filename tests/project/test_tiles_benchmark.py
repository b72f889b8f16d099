"""benchmarks/tiles.py tries every tile that fits a layer, on a CPU by Triton's interpreter."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.kernel_checks import here
from tests.support.paths import ROOT


@here
def test_other_tiles_are_tried_for_every_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "tiles", raising=False)
    import tiles  # type: ignore[import-not-found]

    file = tmp_path / "tiles.json"
    command = ["tiles.py", "--device", "cpu", "--tiny", "--layers", "four quarters, 16-64", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    tiles.main()
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["pass"] for row in rows] == ["forward", "input gradient", "weight gradient"]
    names = [[name for _, name in row["others"]] for row in rows]
    assert "32 × 64 × 64, 2 warps, 3 stages" in names[0]  # a sweep
    assert "128 × 16 × 64, 4 warps, 3 stages" in names[1]  # by taps
    assert names[2] == ["64 × 64 × 16, 4 warps, 3 stages, 528 programs"]

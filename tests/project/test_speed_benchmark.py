"""benchmarks/speed.py fills the table of speeds in one run, and a run that is stopped keeps what it has measured."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT

# What issue 17 asks for: before, aim; in milliseconds, seconds (start, search), or steps of one full network.
PROMISED = {
    "five half ResNet20": (2.57, 1.5),
    "fifteen half ResNet20": (7.1, 3.8),
    "one half ResNet20": (1.1, 0.9),
    "one full ResNet20": (None, 0.9),
    "five half VGG11": (3.4, 2.5),
    "five half ResNet32, 64×64": (18.3, 12.0),
    "four ResNet18 in the memory of one": (1.37, 1.0),
    "start, first on a machine": (16.0, 20.0),
    "start, kernels cached": (1.4, 3.0),
    "search, an epoch": (1.6, None),
    "BatchEnsemble, a step": (None, None),
    "MC-Dropout, a step": (None, None),
    "prediction of five members": (6.0, 2.4),
    "prediction of one full network, eager": (2.4, None),
}


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the script as its folder does, and forget its modules afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speed as module  # type: ignore[import-not-found]

    yield module
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run(speed: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path, *rows: str) -> dict[str, dict[str, Any]]:
    """Run the script on the CPU with tiny settings; return its lines by name."""
    command = ["speed.py", "--device", "cpu", "--tiny", "--json", str(path), "--rows", *rows]
    monkeypatch.setattr(sys, "argv", command)
    speed.main()
    return {line["name"]: line for line in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def test_the_table_has_every_promise(speed: ModuleType) -> None:
    lines = [line for row in speed.ROWS for line in row.lines]
    assert {line.name: (line.before, line.aim) for line in lines} == PROMISED


def test_rows_are_measured_and_added_to_those_of_an_earlier_run(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "speed.json"
    first = run(speed, monkeypatch, path, "predict")
    both = run(speed, monkeypatch, path, "rivals")
    assert {name: both[name] for name in first} == first
    assert set(both) - set(first) == {"BatchEnsemble, a step", "MC-Dropout, a step"}
    assert all(line["measured"] > 0 and line["reached"] is None for line in both.values())
    assert both["BatchEnsemble, a step"]["ways"][0]["ms"] > 0
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["device"].startswith("CPU")
    assert {"torch", "source"} <= set(record["versions"])
    assert "MC-Dropout, a step" in capsys.readouterr().out


def test_a_run_that_is_stopped_keeps_its_rows_and_one_that_fails_goes_on(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_arguments: object) -> list[dict[str, float]]:
        raise ValueError("no such kernel")

    def stop(_arguments: object) -> list[dict[str, float]]:
        raise KeyboardInterrupt

    rows = [
        speed.Row("broken", (speed.Line("a broken row"),), fail),
        speed.Row("quick", (speed.Line("a quick row", "ms", 2.0, 1.0),), lambda _arguments: [{"measured": 0.5}]),
        speed.Row("stopped", (speed.Line("a stopped row"),), stop),
    ]
    monkeypatch.setattr(speed, "ROWS", rows)
    path = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        run(speed, monkeypatch, path, "broken", "quick", "stopped")
    lines = {line["name"]: line for line in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    assert list(lines) == ["a broken row", "a quick row"]
    assert lines["a broken row"]["error"] == "ValueError: no such kernel"
    assert lines["a quick row"]["measured"] == 0.5


@pytest.mark.parametrize(("measured", "reached"), [(0.9, True), (1.0, True), (1.1, False), (None, None)])
def test_an_aim_is_reached_on_the_device_that_it_was_set_for(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, measured: float | None, reached: bool | None
) -> None:
    monkeypatch.setattr(speed, "describe_machine", lambda _: {"device": "NVIDIA H200"})
    line, arguments = speed.Line("a line", "ms", 2.0, 1.0), speed.argparse.Namespace(tiny=False, device="cuda")
    assert speed.has_reached(line, measured, arguments) is reached
    assert speed.has_reached(speed.Line("without an aim"), 1.0, arguments) is None


def test_rows_of_another_machine_are_not_mixed(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "speed.json"
    description = {"device": "another", "versions": {"torch": "1", "python": "3"}, "settings": {"tiny": True}}
    path.write_text(json.dumps(description | {"rows": []}))
    with pytest.raises(SystemExit, match="has rows of another device, version or size"):
        run(speed, monkeypatch, path, "predict")
    with pytest.raises(SystemExit, match=r"--rows must be among resnet20-5, .*, not nonsense"):
        run(speed, monkeypatch, tmp_path / "new.json", "nonsense")

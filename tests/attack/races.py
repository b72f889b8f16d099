"""Two processes in one folder at once: each ends with the right result or a clean refusal, and so does a third."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import structured_ensembles as se

from . import kills, world
from .count import Outcome, chosen
from .sandbox import in_child

Run = Callable[[Path], str]


@dataclass(frozen=True)
class Race:
    """first and second run at the same time; each must tell what it tells alone, or refuse. first runs once more."""

    name: str
    first: Run
    second: Run
    prepare: Callable[[Path], None] = lambda folder: None
    slow: bool = True  # left out of a quick attack


def _same(name: str, scenario: str) -> Race:
    own = kills.SCENARIOS[scenario]
    return Race(f"race-{name}", own.run, own.run, own.prepare, slow=name != "structured")


def _train_seed_1(folder: Path) -> str:
    world.command(*world.TRAIN, "--root", folder / "data", "--out", folder / "run", "--seed", "1")
    return world.told_by_run(folder / "run")


def _fail(folder: Path) -> str:
    """A command with an argument that is found to be wrong after the folder was opened."""
    wrong = ("--method_arguments", "{search_epochs: -1}")
    world.command(*world.TRAIN, "--root", folder / "data", "--out", folder / "run", *wrong)
    return "never"


def _fail_alike(folder: Path) -> str:
    """The same configuration, on a device that does not exist."""
    world.command(*world.TRAIN, "--root", folder / "data", "--out", folder / "run", "--device", "cuda")
    return "never"


def _load_often(folder: Path) -> str:
    """Read while the other one writes: always a whole file."""
    told = {world.told_by(se.Ensemble.load(folder / "e.safetensors")) for _ in range(60)}
    return "whole" if len(told) <= 2 else "torn"


RACES: dict[str, Race] = {
    own.name: own
    for own in (
        _same("sens-train", "kill-sens-train"),
        _same("sens-train-int8", "kill-sens-train-int8"),
        _same("sens-continual", "kill-sens-continual"),
        _same("structured", "kill-structured"),
        _same("run_sequence", "kill-run_sequence"),
        _same("save", "kill-save"),
        _same("data-cache", "kill-data-cache"),
        Race("race-other-seed", kills._train, _train_seed_1),
        Race("race-failing", kills._train, _fail),
        Race("race-failing-alike", kills._train, _fail_alike, slow=False),
        Race("race-reading", kills._save, _load_often, kills._saved_before),
    )
}


def attack_folders(root: Path, seed: int, rounds: int, quick: bool = False, only: str = "") -> list[Outcome]:
    """Run every race `rounds` times, the second process a random moment after the first."""
    outcomes = []
    for race in RACES.values():
        if not chosen(race.name, only) or (quick and race.slow):
            continue
        prepared = root / race.name
        prepared.mkdir()
        in_child(lambda race=race, prepared=prepared: race.prepare(prepared))  # type: ignore[misc]
        expected = [_alone(run, prepared, root / "folder") for run in (race.first, race.second)]
        cases = [only] if "/" in only else [f"{race.name}/start/{number}" for number in range(rounds)]
        for case in cases:
            outcomes += [_outcome(case, race, prepared, root / "folder", expected, Random(f"{seed}/{case}"))]
    return outcomes


def _alone(run: Run, prepared: Path, folder: Path) -> Any:
    _lay_out(prepared, folder)
    start = time.perf_counter()
    answer = in_child(lambda: kills._reported(run, folder))[1]
    return [*answer, time.perf_counter() - start]


def _outcome(case: str, race: Race, prepared: Path, folder: Path, expected: list[Any], random: Random) -> Outcome:
    _lay_out(prepared, folder)
    delay = random.choice([0.0, random.uniform(0, expected[0][2])])
    answers = _both(race, folder, delay)
    _, last = in_child(lambda: kills._reported(race.first, folder))
    after = f"{delay:.2f} s apart"
    for who, answer, right in (*zip(("first", "second"), answers, expected, strict=True), ("third", last, expected[0])):
        if answer is None or answer[0] == "other":
            return Outcome(case, "other", f"{after}, the {who} process ended with {answer and answer[1]}")
        if answer[0] == "told" and answer[1] != right[1]:
            return Outcome(case, "different", f"{after}, the {who} process tells something else")
    if all(answer[0] == "clean" for answer in answers) and race.second is race.first:
        return Outcome(case, "other", f"{after}, both were refused: {answers[0][1]}")
    if last[0] == "clean" and answers[0][0] == "told":
        return Outcome(case, "other", f"{after}, the first was done, but the third was refused: {last[1]}")
    refused = any(answer[0] == "clean" for answer in (*answers, last))
    return Outcome(case, "clean" if refused else "equal", after)


def _both(race: Race, folder: Path, delay: float) -> list[Any]:
    """Run both in processes of their own; the second answers through a file, since this process waits for the first."""
    path = folder.with_name("second.json")
    child = os.fork()
    if child == 0:
        time.sleep(delay)
        _, answer = in_child(lambda: kills._reported(race.second, folder))
        path.write_text(json.dumps(answer))
        os._exit(0)
    first = in_child(lambda: kills._reported(race.first, folder))[1]
    os.waitpid(child, 0)
    second = json.loads(path.read_text())
    return [first, second]


def _lay_out(prepared: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared, folder)

"""Kill runs at every write, fill the disk or interrupt them there, and give the command again: it must end the same."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import structured_ensembles as se

from . import world
from .count import Outcome, chosen, judged
from .sandbox import in_child

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
WAYS = {
    "kill": "SIGKILL just before it",
    "torn": "SIGKILL, and half of the file is lost",
    "twice": "SIGKILL, and the second run is killed too, at some other write",
    "full": "no space is left on the disk",
    "interrupt": "Ctrl-C",
}


@dataclass(frozen=True)
class Scenario:
    """A run that writes into a folder. run: returns a fingerprint of its result. prepare: what is there before it."""

    name: str
    run: Callable[[Path], str]
    prepare: Callable[[Path], None] = lambda folder: None
    slow: bool = False  # left out of a quick attack


def _method(name: str) -> Scenario:
    def run(folder: Path) -> str:
        return world.told_by(world.run_method(name, folder))

    return Scenario(f"kill-{name}", run, slow=name != "structured")


def _train(folder: Path) -> str:
    world.command(*world.TRAIN, "--root", folder / "data", "--out", folder / "run")
    return world.told_by_run(folder / "run")


def _train_int8(folder: Path) -> str:
    own = ("--root", folder / "data", "--out", folder / "run", "--method", "deep", "--method_arguments", "{}")
    world.command(*world.TRAIN, *own, "--storage", "int8")
    return world.told_by_run(folder / "run")


def _continual(folder: Path) -> str:
    world.command(*world.CONTINUAL, "--root", folder / "data", "--out", folder / "run", "--method", "pruning")
    return world.told_by_run(folder / "run")


def _sequence(folder: Path) -> str:
    learner = world.new_learner("structured")
    matrix = se.continual.run_sequence(learner, world.tasks(), folder)
    return world.digest(world.told_by_learner(learner), matrix.to_dict())


def _save(folder: Path) -> str:
    """Over a file that is there: whoever loads it at any moment has the one ensemble or the other."""
    path = folder / "e.safetensors"
    if path.exists():
        se.Ensemble.load(path)
    world.run_method("deep", None).save(path)
    return world.told_by(se.Ensemble.load(path))


def _saved_before(folder: Path) -> None:
    world.run_method("single", None).save(folder / "e.safetensors")


def _cache(folder: Path) -> str:
    return world.told_by_data(se.load_data("tiny", folder))


def _trained_before(folder: Path) -> None:
    _train(folder)


def _evaluate(folder: Path) -> str:
    where = ("--root", folder / "data", "--device", "cpu")
    world.command("evaluate", folder / "run", *where, "--fgsm", "0.1")
    world.command("report", folder / "run", *where, "--out", folder / "report")
    files = sorted([*folder.glob("run/*.safetensors"), *folder.glob("report/*.md")])
    return world.digest(*[path.read_bytes() for path in files])


SCENARIOS: dict[str, Scenario] = {
    own.name: own
    for own in (
        *map(_method, ("structured", "deep", "snapshot", "batch-ensemble", "mc-dropout")),
        Scenario("kill-sens-train", _train),
        Scenario("kill-sens-train-int8", _train_int8, slow=True),
        Scenario("kill-sens-continual", _continual, slow=True),
        Scenario("kill-run_sequence", _sequence),
        Scenario("kill-save", _save, _saved_before),
        Scenario("kill-data-cache", _cache),
        Scenario("kill-sens-evaluate", _evaluate, _trained_before, slow=True),
    )
}


def attack_runs(root: Path, seed: int, rounds: int, quick: bool = False, only: str = "") -> list[Outcome]:
    """Stop every scenario at `rounds` of its writes in random order, at each in all ways before any comes again."""
    outcomes = []
    for scenario in SCENARIOS.values():
        if not chosen(scenario.name, only) or (quick and scenario.slow):
            continue
        own = _Kills(scenario, root / scenario.name)
        cases = [only] if "/" in only else own.cases(seed, rounds)
        outcomes += [own.outcome(case) for case in cases]
        shutil.rmtree(root / scenario.name)
    return outcomes


class _Kills:
    """One scenario, what it gives when nobody stops it, and its writes."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        self.scenario, self.prepared, self.folder = scenario, root / "prepared", root / "folder"
        self.prepared.mkdir(parents=True)
        in_child(lambda: scenario.prepare(self.prepared))
        self.expected, self.writes = self._undisturbed()

    def cases(self, seed: int, rounds: int) -> list[str]:
        every = [(number, way) for number, event in enumerate(self.writes) for way in _ways(event)]
        Random(f"{seed}/{self.scenario.name}").shuffle(every)
        every.sort(key=lambda pair: pair[1] in ("full", "interrupt"))  # kills first
        return [f"{self.scenario.name}/{way}/{number}" for number, way in every[:rounds]]

    def outcome(self, case: str) -> Outcome:
        """Stop the run, look at what the process said of it, give it again, and compare."""
        _, way, number = case.split("/")
        self._lay_out()
        status, said = in_child(lambda: self._stopped_run(way, int(number)))
        if way in ("kill", "torn", "twice") and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            return Outcome(case, "other", f"it was not killed, but said {said} with status {status}")
        if said is not None and said[0] == "other":
            return Outcome(case, "other", f"stopped at {self._where(number)}, it said {said[1]}")
        if way == "twice":
            other = Random(case).randrange(len(self.writes))  # if the second run has as many
            in_child(lambda: self._stopped_run("kill", other))
        _, again = in_child(lambda: _reported(self.scenario.run, self.folder))
        if again is None or again[0] != "told":
            return Outcome(case, "other", f"stopped at {self._where(number)}, then: {again and again[1]}")
        if again[1] != self.expected:
            return Outcome(case, "different", f"stopped at {self._where(number)}")
        left = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*.part")]
        return Outcome(case, "equal", f"left behind: {', '.join(left)}" if left else "")

    def _where(self, number: str) -> str:
        return f"write {number} of {len(self.writes)} ({self.writes[int(number)]})"

    def _undisturbed(self) -> tuple[str, list[str]]:
        self._lay_out()
        watch = Watch(self.folder)

        def work() -> Any:
            watch.start()
            return [_reported(self.scenario.run, self.folder), watch.events]

        _, (answer, events) = in_child(work)
        if answer[0] != "told":
            raise RuntimeError(f"{self.scenario.name} fails when nobody stops it: {answer[1]}")
        return answer[1], events

    def _stopped_run(self, way: str, number: int) -> Any:
        Watch(self.folder, number, way).start()
        return _reported(self.scenario.run, self.folder)

    def _lay_out(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.prepared, self.folder)


def _ways(event: str) -> tuple[str, ...]:
    return tuple(way for way in WAYS if way != "torn" or event.startswith("fsync"))


def _reported(run: Callable[[Path], str], folder: Path) -> tuple[str, str]:
    """Run, and tell the fingerprint, a clean error, or something else."""
    warnings.simplefilter("ignore")
    try:
        return "told", run(folder)
    except KeyboardInterrupt:
        return "clean", "interrupted"
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return "clean", str(error)
        verdict, text = judged(error)
        if verdict == "clean" or "No space left" in text or "ended with 130" in text:
            return "clean", text
        return "other", text


class Watch:
    """See every change that this process makes below a folder, and strike at one of them."""

    def __init__(self, folder: Path, number: int | None = None, way: str = "kill") -> None:
        self.folder, self.number, self.way = str(folder), number, way
        self.events: list[str] = []

    def start(self) -> None:
        """From now on, in this process; there is no way to end it but the end of the process."""
        sys.addaudithook(self._audited)
        flush = os.fsync

        def fsync(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(self.folder):
                self._seen("fsync", path)
            flush(file)

        os.fsync = fsync

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | Path) and flags & (os.O_WRONLY | os.O_RDWR) and self._inside(path):
                self._seen("open", path)
        elif event in CHANGES and self._inside(arguments[0]):
            self._seen(event, arguments[0])

    def _inside(self, path: Any) -> bool:
        return isinstance(path, str | Path) and str(path).startswith(self.folder)

    def _seen(self, event: str, path: Any) -> None:
        name = Path(path).name.split(".safetensors.")[0]
        self.events.append(f"{event} {name}")
        if len(self.events) - 1 != self.number:
            return
        if self.way == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if self.way == "interrupt":
            raise KeyboardInterrupt
        if self.way == "torn":  # a power cut, of which the disk has seen half
            os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

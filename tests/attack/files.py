"""Attack files: make one of every kind, then damage or forge copies of it and read them."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from random import Random
from typing import Any

from . import world
from .count import Outcome, chosen, judged
from .damage import DAMAGES, forge_length
from .forge import FORGERIES, MAY_DIFFER
from .kinds import KINDS, Kind, Make, Read, fresh
from .sandbox import in_child, run_cases
from .special import MISSING, SPECIALS


def attack_files(root: Path, seed: int, rounds: int, quick: bool = False, only: str = "") -> list[Outcome]:
    """Attack every kind of file in its own sandbox."""
    outcomes = []
    specimens = _Specimens(root, reads=1 if quick else 2)
    for kind in KINDS.values():
        count = rounds * kind.per_round // (2 if quick else 1)
        if not chosen(kind.name, only) or (quick and kind.slow):
            continue
        cases = [only] if "/" in only else [f"{kind.name}/{name}" for name in _attacks(kind, seed, count)]
        attack = _Attack(kind, specimens.folder(kind), root / "scratch", specimens.told(kind), seed, loud="/" in only)
        outcomes += run_cases(cases, attack)
    return outcomes


class _Specimens:
    """Untouched folders, and what is told by them; kinds of file that lie in the same folder share it."""

    def __init__(self, root: Path, reads: int) -> None:
        self.root, self.reads = root, reads
        self._folders: dict[Make, Path] = {}
        self._told: dict[tuple[Make, Read], str] = {}

    def folder(self, kind: Kind) -> Path:
        if kind.make not in self._folders:
            folder = self.root / f"specimen-{len(self._folders)}"
            folder.mkdir()
            _succeed(f"making {kind.name}", lambda: kind.make(folder))
            self._folders[kind.make] = folder
        return self._folders[kind.make]

    def told(self, kind: Kind) -> str:
        folder, key = self.folder(kind), (kind.make, kind.read)
        if key not in self._told:
            told = [_succeed(f"reading {kind.name}", self._reading(kind, folder)) for _ in range(self.reads)]
            if len(set(told)) > 1:
                raise RuntimeError(f"{kind.name} tells something else every time it is read")
            self._told[key] = told[0]
        return self._told[key]

    def _reading(self, kind: Kind, folder: Path) -> Callable[[], str]:
        return lambda: kind.read(fresh(folder, self.root / "scratch"))


def _succeed(what: str, work: Callable[[], Any]) -> Any:
    status, answer = in_child(work)
    if status != 0:
        raise RuntimeError(f"{what} failed: the process ended with {os.waitstatus_to_exitcode(status)}")
    return answer


class _Attack:
    """One kind of file under attack: call it with the name of a case, kind/attack/number."""

    def __init__(self, kind: Kind, specimen: Path, scratch: Path, expected: str, seed: int, loud: bool) -> None:
        self.kind, self.specimen, self.scratch, self.expected = kind, specimen, scratch, expected
        self.seed, self.loud = seed, loud
        self.canary_ran: Callable[[], bool] | None = None

    def __call__(self, case: str) -> tuple[str, str]:
        if self.canary_ran is None:
            cage = self.scratch.with_name("cage")
            cage.mkdir(exist_ok=True)
            self.canary_ran = world.plant_canary(cage)
        _, attack, _ = case.split("/")
        folder = fresh(self.specimen, self.scratch)
        path = self.kind.path(folder)
        self._strike(path, attack, Random(_number(f"{self.seed}/{case}")))
        try:
            told = self.kind.read(folder)
            verdict, detail = self._compared(told, attack)
        except Exception as error:
            verdict, detail = judged(error)
            if self.loud:
                traceback.print_exc()
        except BaseException as error:
            verdict, detail = "other", repr(error)
        if self.canary_ran():
            verdict, detail = "other", f"code ran: {detail}"
        return verdict, detail.replace(str(self.scratch), "…")

    def _strike(self, path: Path, attack: str, random: Random) -> None:
        if attack in SPECIALS:
            SPECIALS[attack](path)
        elif attack in FORGERIES[self.kind.form]:
            FORGERIES[self.kind.form][attack](random, path)
        else:
            damage = forge_length if attack == "forge-length" else DAMAGES[attack]
            path.write_bytes(damage(random, path.read_bytes()))

    def _compared(self, told: str, attack: str) -> tuple[str, str]:
        if told == self.expected:
            return "equal", ""
        forged = attack in FORGERIES[self.kind.form]
        excused = attack in MAY_DIFFER if forged else attack in MISSING or not self.kind.sealed
        return ("accepted" if excused else "different"), ""


def _attacks(kind: Kind, seed: int, count: int) -> list[str]:
    """Draw `count` attacks: every attack once in random order, then all of them again."""
    names = [*DAMAGES, *SPECIALS, *FORGERIES[kind.form], *FORGERIES[kind.form]]
    names += ["forge-length"] if kind.form == "container" else []

    def shuffled(turn: int) -> Iterator[str]:
        drawn = list(names)
        Random(_number(f"{seed}/{kind.name}/{turn}")).shuffle(drawn)
        return iter(drawn)

    endless = chain.from_iterable(shuffled(turn) for turn, _ in enumerate(repeat(None)))
    return [f"{name}/{number}" for number, name in enumerate(islice(endless, count))]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

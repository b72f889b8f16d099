"""`python -m tests.attack [files] [kills] [races]`: print the counts; exit with 1 if anything is different or other."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # before torch: forks need it

import torch

from structured_ensembles.common.tables import text_table
from structured_ensembles.runs.machine import describe_machine

from . import world
from .count import VERDICTS, Outcome, counted, examples, total
from .files import attack_files
from .kills import attack_runs
from .races import attack_folders

PARTS = {"files": attack_files, "kills": attack_runs, "races": attack_folders}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--rounds", type=int, default=1, help="how often every kind is attacked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    parser.add_argument(
        "--only", default="", help="one case, as it was printed, with its traceback; or a kind, or a pattern of kinds"
    )
    parser.add_argument("--json", type=Path, help="record the counts; the parts that were not run now are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world.register()
    failed = False
    for part in options.parts or PARTS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="attack-") as root:
            outcomes = PARTS[part](Path(root), options.seed, options.rounds, options.quick, options.only)
        seconds = time.perf_counter() - start
        _show(part, outcomes, seconds)
        failed |= any(outcome.failed for outcome in outcomes)
        if options.json:
            _record(options.json, part, outcomes, options, seconds)
    return int(failed)


def _show(part: str, outcomes: list[Outcome], seconds: float) -> None:
    rows = counted(outcomes)
    rows["all"] = total(rows.values())
    cells = [(name, *(str(value) for value in row.values())) for name, row in rows.items()]
    print(text_table((part, "cases", *VERDICTS, "most s", "most MiB"), cells))
    print(f"{seconds:.0f} s")
    for line in examples(outcomes):
        print(line)
    sys.stdout.flush()


def _record(path: Path, part: str, outcomes: list[Outcome], options: argparse.Namespace, seconds: float) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    rows = counted(outcomes)
    own = {"date": date.today().isoformat(), **describe_machine("cpu"), "rounds": options.rounds, "seed": options.seed}
    own |= {"seconds": round(seconds), "total": total(rows.values()), "rows": rows, "failures": examples(outcomes)}
    found[part] = own
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""The attack, small: seconds of what `python -m tests.attack --rounds …` does in minutes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_attack_ends_in_a_clean_error_or_an_equal_result(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Every outcome is a clean error or an equal result; a failure prints the table and how to repeat each case."""
    rounds = request.config.getoption("--rounds", default=1)
    command = [sys.executable, "-m", "tests.attack", "--rounds", str(rounds), *(["--quick"] if rounds == 1 else [])]
    source = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **source}, capture_output=True, text=True, check=False)
    totals = re.findall(r"^all +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)", ended.stdout, re.MULTILINE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(totals) == 3  # files, kills, races
    for cases, clean, equal, accepted, different, other in (map(int, row) for row in totals):
        assert cases == clean + equal + accepted
        assert different == other == 0
    record_property("figures", f"attack: {', '.join(row[0] for row in totals)} files, kills and races")

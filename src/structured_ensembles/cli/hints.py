"""Suggested next commands, written so that they work when pasted."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def suggest_commands(commands: Sequence[str], run: Path, code: Sequence[str] = (), root: Path | None = None) -> str:
    """Write one line per command for a run folder.

    code: data set and network of the run; functions of the user must be trusted. root: the data folder, if it is not
        the default one.
    """
    functions = [name for name in code if ":" in name]
    options = ["--trust-code"] * bool(functions) + ([] if root is None else ["--root", str(root)])
    # Functions named in files are found in the current folder only by PYTHONPATH.
    setting = "PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} " if any(map(_is_in_current_folder, functions)) else ""
    program = ["sens"] if shutil.which("sens") else [sys.executable, "-m", "structured_ensembles"]
    lines = [setting + shlex.join([*program, command, str(run), *options]) for command in commands]
    return "\n".join(["Next:", *(f"  {line}" for line in lines)])


def _is_in_current_folder(name: str) -> bool:
    """Tell whether the package of a function lies in the current folder."""
    package = name.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package)
    origins = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    folders = {parent for origin in origins if origin for parent in (Path(origin).parent, Path(origin).parent.parent)}
    return Path.cwd() in {folder.resolve() for folder in folders}

"""Code of the user: functions that options name, trusted or not, and the current folder to import them from."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from structured_ensembles.data.sources import is_folder

CODE = ("dataset", "model", "method", "ood", "check")  # options that may be package.module:function
DATA = ("dataset", "ood")  # options that may be folder:PATH, pictures and no code


def check_code(options: Mapping[str, Any], words: Sequence[str], trust_code: bool) -> None:
    """Raise a ValueError for functions that only a file of `--config` names, unless they are trusted."""
    if trust_code:
        return
    for option, name in _list_functions(options):
        if not _is_among(name, words):
            raise ValueError(
                f"the file of --config asks to import {name} as {option}: say --trust-code to let it, or "
                f"--{option} {name} on the command line"
            )


@contextmanager
def search_current_folder(options: Mapping[str, Any], words: Sequence[str]) -> Iterator[None]:
    """Add the current folder to the end of `sys.path` while functions named on the command line are used."""
    here = os.getcwd()
    if here in sys.path or not any(_is_among(name, words) for _, name in _list_functions(options)):
        yield
        return
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def _list_functions(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the options that name functions to import, with each function."""
    values = [(option, options.get(option)) for option in CODE]
    names = [(option, name) for option, value in values for name in (value if isinstance(value, list) else [value])]
    return [
        (option, name)
        for option, name in names
        if isinstance(name, str) and ":" in name and not (option in DATA and is_folder(name))
    ]


def _is_among(name: str, words: Sequence[str]) -> bool:
    """Tell whether a word, or the value of `--option=value`, is this name."""
    return any(word == name or word.partition("=")[2] == name for word in words)

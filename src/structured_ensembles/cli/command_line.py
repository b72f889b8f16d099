"""Command lines brought into the one form that the parser reads, and the code that they name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from structured_ensembles.data.sources import is_folder
from structured_ensembles.storage.files import read_text
from structured_ensembles.storage.safe_yaml import parse_yaml
from structured_ensembles.training.execution import split_config

CODE = ("dataset", "model", "method", "ood", "check")  # options that may be package.module:function
DATA = ("dataset", "ood")  # options that may be folder:PATH, pictures and no code
EMPTY = "{}"  # a configuration without options


def normalize_words(words: Sequence[str], commands: Mapping[str, Callable[..., int]]) -> list[str]:
    """Normalise a command line, so that different spellings give the same words.

    `--trust-code` is `--trust_code`; `--smoke` alone is `--smoke true`; files of `--config` come first, so that every
    option overrides them.
    """
    if not words or words[0] not in commands:
        return list(words)
    switches = _list_switches(get_type_hints(commands[words[0]])) | {"trust_code"}
    end = words.index("--") if "--" in words else len(words)  # no options follow
    options = _complete_switches(list(map(_underscore, words[1:end])), switches)
    return [words[0], *_move_configs_first(options), *words[end:]]


def _list_switches(hints: Mapping[str, Any]) -> set[str]:
    """List the options that are true or false, such as "quiet" and "execution.compile"."""
    switches = {name for name, hint in hints.items() if hint is bool}
    for name, hint in hints.items():
        if is_dataclass(hint):
            switches |= {f"{name}.{key}" for key, field_type in get_type_hints(hint).items() if field_type is bool}
    return switches


def _underscore(word: str) -> str:
    """Write the name of an option with underscores; its value, and other words, stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    option, dot, key = name.partition(".")  # --changes.weight-decay is a key of the user's
    return "--" + option.replace("-", "_") + dot + key + equals + value


def _complete_switches(words: Sequence[str], switches: Collection[str]) -> list[str]:
    """Add `true` after every switch without a value."""
    completed: list[str] = []
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        completed.append(word)
        if word.startswith("--") and word[2:] in switches:
            completed += [] if following.lower() in ("true", "false", "yes", "no") else ["true"]
    return completed


def _move_configs_first(words: Sequence[str]) -> list[str]:
    """Move the configurations of `--config` to the front.

    An empty configuration takes the place of each: without it, `--fgsm --config FILE runs/a` would read as
    `--fgsm runs/a`.
    """
    first: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name != "--config":
            rest.append(word)
            continue
        path = value if equals else next(remaining, None)
        if path is None:
            return list(words)  # the parser reports the missing file
        first += ["--config", _read_config_file(Path(path))]
        rest += ["--config", EMPTY]
    return first + rest


def _read_config_file(path: Path) -> str:
    """Read a file of options, whose names may have dashes, into YAML that the parser takes."""
    try:
        options = parse_yaml(read_text(path))
    except ValueError as error:
        raise ValueError(f"--config must be a YAML file of options, not {path}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"--config must be a YAML file that can be read, not {path}: {error.strerror or error}"
        ) from error
    if options is None:
        return EMPTY
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(f"--config must be a YAML file with lines such as `members: 5`, not {path}")
    if "config" in options:
        raise ValueError(f"{path} cannot name another file of options: give both as --config on the command line")
    underscored = {name.replace("-", "_"): value for name, value in options.items()}
    return str(yaml.safe_dump(split_config(underscored), allow_unicode=True))


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

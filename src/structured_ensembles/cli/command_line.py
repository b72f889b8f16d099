"""The words of a command line, in the one form that the parser reads; and the code that they name."""

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

from structured_ensembles.storage.files import read_text
from structured_ensembles.storage.safe_yaml import parse_yaml
from structured_ensembles.training.execution import split_config

CODE = ("dataset", "model", "method", "ood")  # options that may be package.module:function
EMPTY = "{}"  # a configuration that says nothing


def settled_words(words: Sequence[str], commands: Mapping[str, Callable[..., int]]) -> list[str]:
    """Bring a command line into the form that does not depend on how it was written.

    `--trust-code` is `--trust_code`; `--smoke` alone is `--smoke true`; files of `--config` come first, so that every
    option beats them.
    """
    if not words or words[0] not in commands:
        return list(words)
    switches = _switches(get_type_hints(commands[words[0]])) | {"trust_code"}
    end = words.index("--") if "--" in words else len(words)  # all that follows is no option
    options = _with_values(list(map(_underscored, words[1:end])), switches)
    return [words[0], *_configurations_first(options), *words[end:]]


def _switches(hints: Mapping[str, Any]) -> set[str]:
    """List the options that are true or false, such as "quiet" and "execution.compile"."""
    found = {name for name, hint in hints.items() if hint is bool}
    for name, hint in hints.items():
        if is_dataclass(hint):
            found |= {f"{name}.{key}" for key, kind in get_type_hints(hint).items() if kind is bool}
    return found


def _underscored(word: str) -> str:
    """Write the name of an option with underscores; its value, and what is no option, stays."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    option, dot, key = name.partition(".")  # --changes.weight-decay is a key of the user's
    return "--" + option.replace("-", "_") + dot + key + equals + value


def _with_values(words: Sequence[str], switches: Collection[str]) -> list[str]:
    found: list[str] = []
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        found.append(word)
        if word.startswith("--") and word[2:] in switches:
            found += [] if following.lower() in ("true", "false", "yes", "no") else ["true"]
    return found


def _configurations_first(words: Sequence[str]) -> list[str]:
    """Move what the files of `--config` say to the front.

    An empty configuration stays where each was: without it, `--fgsm --config FILE runs/a` would read as
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
            return list(words)  # the parser says that a file is missing
        first += ["--config", _configuration(Path(path))]
        rest += ["--config", EMPTY]
    return first + rest


def _configuration(path: Path) -> str:
    """Read a file of options, whose names may have dashes, as YAML that the parser takes."""
    try:
        options = parse_yaml(read_text(path))
    except ValueError as error:
        raise ValueError(f"--config must be a YAML file of options, and {path} is none: {error}") from error
    except OSError as error:
        raise ValueError(
            f"--config must be a YAML file, and {path} cannot be read: {error.strerror or error}"
        ) from error
    if options is None:
        return EMPTY
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(f"--config must be a YAML file with lines such as `members: 5`, and {path} is not")
    if "config" in options:
        raise ValueError(f"{path} cannot name another file of options: give both as --config on the command line")
    named = {name.replace("-", "_"): value for name, value in options.items()}
    return str(yaml.safe_dump(split_config(named), allow_unicode=True))


def check_code(options: Mapping[str, Any], words: Sequence[str], trust_code: bool) -> None:
    """Refuse functions that a file of `--config` names, and the command line does not, unless they are trusted."""
    if trust_code:
        return
    for option, name in _code(options):
        if not _is_among(name, words):
            raise ValueError(
                f"the file of --config asks to import {name} as {option}: say --trust-code to let it, or "
                f"--{option} {name} on the command line"
            )


@contextmanager
def current_folder_for(options: Mapping[str, Any], words: Sequence[str]) -> Iterator[None]:
    """Let functions that the command line itself names be found in the current folder, after all that is installed."""
    here = os.getcwd()
    if here in sys.path or not any(_is_among(name, words) for _, name in _code(options)):
        yield
        return
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def _code(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the options that are functions to import, with each function."""
    given = [(option, options.get(option)) for option in CODE]
    every = [(option, name) for option, own in given for name in (own if isinstance(own, list) else [own])]
    return [(option, name) for option, name in every if isinstance(name, str) and ":" in name]


def _is_among(name: str, words: Sequence[str]) -> bool:
    return any(word == name or word.partition("=")[2] == name for word in words)

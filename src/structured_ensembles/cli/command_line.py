"""parse_words(): the options of a command from the words of a command line and the files of `--config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

from structured_ensembles.cli.options import CONFIG, REQUIRED, Option
from structured_ensembles.cli.values import FALSE, TRUE, convert_value, convert_word, parse_word, suggest
from structured_ensembles.methods import METHODS
from structured_ensembles.storage.files import read_text
from structured_ensembles.storage.safe_yaml import parse_yaml
from structured_ensembles.training.execution import split_config
from structured_ensembles.training.recipe import Recipe


def parse_words(command: str, words: Sequence[str], options: Mapping[str, Option]) -> dict[str, Any]:
    """Parse the words after a command; return the value of every option by name.

    `--trust-code` is `--trust_code`; `--smoke` alone is `--smoke true`; `--changes.rate 0.1` sets one key of a mapping.
    What the command line says overrides the files of `--config`, wherever these stand; later files override earlier
    ones. Raises a ValueError that says what was wrong, what was given and what is possible.
    """
    named, free_words = _split_words(command, words, options)
    values = {name: option.default for name, option in options.items() if not option.is_positional}
    for path in [Path(option_words[0]) for option, _, option_words in named if option is CONFIG]:
        for name, value in _read_config_file(path).items():
            if name not in options:
                raise ValueError(f"{path}: {_no_such_option(command, name, options)}")
            values[name] = _merge(values.get(name), options[name], convert_value(options[name], value))
    for option, key, option_words in named:
        if option is not CONFIG:
            _set_value(values, option, key, option_words)
    values |= _assign_positional(free_words, options)
    missing = [option for name, option in options.items() if option.is_positional and name not in values]
    if missing:
        labels = " and ".join(option.label for option in missing)
        raise ValueError(f"{command} needs {labels}: {usage(command, options)}")
    return values


def usage(command: str, options: Mapping[str, Option]) -> str:
    """Write how a command is called: `sens predict RUN IMAGES … [options]`."""
    positional = [option.label + " …" * bool(option.list_type) for option in options.values() if option.is_positional]
    return " ".join(["sens", command, *positional, "[options]"])


def _split_words(
    command: str, words: Sequence[str], options: Mapping[str, Option]
) -> tuple[list[tuple[Option, str, list[str]]], list[str]]:
    """Split words into options, each with its key (of a mapping) and its values, and the words without a name."""
    named: list[tuple[Option, str, list[str]]] = []
    free_words: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if word == "--":  # no options follow
            return named, free_words + remaining
        if not word.startswith("--"):
            free_words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        option, key = _find_option(command, name, options)
        if equals:
            named.append((option, key, [value]))
        else:
            named.append((option, key, _collect_values(option, key, remaining)))
    return named, free_words


def _find_option(command: str, name: str, options: Mapping[str, Option]) -> tuple[Option, str]:
    """Find an option by its name on the command line, and the key of a mapping or of a dataclass."""
    first, _, key = name.partition(".")
    plain = first.replace("-", "_")
    if plain == "config" and not key:
        return CONFIG, ""
    option = options.get(plain)
    if option is None or (key and not (option.is_mapping or option.fields)):
        raise ValueError(_no_such_option(command, name, options))
    if option.is_positional:
        raise ValueError(f"{option.label} has no name: {usage(command, options)}")
    if option.fields:
        plain_key = key.replace("-", "_")
        if key and plain_key not in option.fields:
            labels = [field.label for field in option.fields.values()]
            hint = suggest(f"--{name}", labels) or ":"
            raise ValueError(f"{command} has no option --{name}{hint} there are {', '.join(labels)}")
        return (option.fields[plain_key], plain_key) if key else (option, "")
    return option, key


def _collect_values(option: Option, key: str, remaining: list[str]) -> list[str]:
    """Take the values of an option from the front of the remaining words."""
    if option.is_switch:
        return [remaining.pop(0)] if remaining and remaining[0].lower() in TRUE + FALSE else ["true"]
    collected: list[str] = []
    while remaining and not remaining[0].startswith("--") and (option.list_type or not collected):
        collected.append(remaining.pop(0))
    if not collected and not option.list_type:
        kind = "a value" if key and option.is_mapping else "a file" if option is CONFIG else option.kind
        raise ValueError(f"{option.label} needs a value: {kind}")
    return collected


def _set_value(values: dict[str, Any], option: Option, key: str, option_words: Sequence[str]) -> None:
    """Set the value of an option, or of one key of it."""
    name = option.name.partition(".")[0]
    if key:
        value = parse_word(option, option_words[0]) if option.is_mapping else convert_word(option, option_words[0])
        values[name] = _merge(values[name], None, {key: value})
    elif option.list_type:
        values[name] = [convert_word(option, word) for word in option_words]
    elif option.fields:
        values[name] = _merge(values[name], option, convert_value(option, parse_word(option, option_words[0])))
    else:
        values[name] = convert_word(option, option_words[0])


def _merge(before: Any, option: Option | None, value: Any) -> Any:
    """Return the new value of an option: fields of a dataclass, or one key of a mapping, are added to those before."""
    if option is not None and not option.fields:
        return value
    if before is None or isinstance(before, dict):
        return {**(before or {}), **value}
    return type(before)(**{**vars(before), **value})


def _assign_positional(words: Sequence[str], options: Mapping[str, Option]) -> dict[str, Any]:
    """Assign the words without a name to the positional arguments, in their order; a list takes all that are left."""
    assigned: dict[str, Any] = {}
    remaining = list(words)
    for name, option in options.items():
        if option.is_positional and remaining:
            if option.list_type:
                assigned[name], remaining = [convert_word(option, word) for word in remaining], []
            else:
                assigned[name] = convert_word(option, remaining.pop(0))
    if remaining:
        positional = [option.label for option in options.values() if option.default is REQUIRED]
        takes = f"takes {' and '.join(positional)} without a name" if positional else "takes only options with a name"
        raise ValueError(f"this command {takes}, not also {' '.join(map(repr, remaining))}: --help shows all options")
    return assigned


def _no_such_option(command: str, name: str, options: Mapping[str, Option]) -> str:
    """Write the sentence for an option that a command does not have."""
    labels = [option.label for option in options.values() if not option.is_positional] + ["--config"]
    place = _place_in_a_mapping(name.replace("-", "_"), options)
    hint = f": write {place};" if place else suggest(f"--{name.replace('_', '-')}", labels) or ":"
    return f"{command} has no option --{name}{hint} `sens {command} --help` lists all of them"


def _place_in_a_mapping(name: str, options: Mapping[str, Option]) -> str:
    """Return how to write a field of the recipe, or an argument of a method, which mappings take; else nothing."""
    if "changes" in options and name in {field.name for field in fields(Recipe)}:
        return f"--changes.{name} …"
    known = (parameter for method in METHODS.values() for parameter in signature(method).parameters)
    return f"--method-arguments.{name} …" if "method_arguments" in options and name in known else ""


def _read_config_file(path: Path) -> dict[str, Any]:
    """Read a file of options; their names may have dashes."""
    try:
        options = parse_yaml(read_text(path))
    except ValueError as error:
        raise ValueError(f"--config must be a YAML file of options, not {path}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"--config must be a YAML file that can be read, not {path}: {error.strerror or error}"
        ) from error
    if options is None:
        return {}
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(f"--config must be a YAML file with lines such as `members: 5`, not {path}")
    if "config" in options:
        raise ValueError(f"{path} cannot name another file of options: give both as --config on the command line")
    return split_config({name.replace("-", "_"): value for name, value in options.items()})

"""Values of options: words of the command line, or values of a YAML file, converted to the option's type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from structured_ensembles.cli.options import Option
from structured_ensembles.storage.safe_yaml import parse_yaml

TRUE, FALSE = ("true", "yes"), ("false", "no")


def convert_word(option: Option, word: str) -> Any:
    """Convert a word of the command line to the type of an option; raise a ValueError that says what is possible."""
    if option.may_be_none and word in ("null", "None"):
        return None
    if option.is_switch:
        if word.lower() not in TRUE + FALSE:
            raise _wrong(option, word)
        return word.lower() in TRUE
    if option.is_mapping:
        return convert_value(option, parse_word(option, word))
    if option.value_type in (int, float):
        try:
            return option.value_type(word)
        except ValueError:
            raise _wrong(option, word) from None
    return convert_value(option, word, single=True)


def convert_value(option: Option, value: Any, single: bool = False) -> Any:
    """Convert a value of a YAML file to the type of an option. single: it is one of the values of a list."""
    if value is None and option.may_be_none:
        return None
    if option.list_type and not single:
        if not isinstance(value, list):
            raise ValueError(f"{option.label} must be a list of values, such as [{value}], not {value!r}")
        return [convert_value(option, item, single=True) for item in value]
    if option.fields:
        return _convert_fields(option, value)
    kind = option.value_type
    if option.choices:
        if value not in option.choices:
            raise _wrong(option, value)
    elif option.is_mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{option.label} must be a mapping, such as '{{name: 1}}', not {value!r}")
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise _wrong(option, value)
    return value


def parse_word(option: Option, word: str) -> Any:
    """Parse a word as YAML, for a mapping, whose values have no type."""
    try:
        return parse_yaml(word)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{option.label} must be a mapping, such as '{{name: 1}}', not {word!r}: {error}") from None


def suggest(word: str, possible: Iterable[str]) -> str:
    """Return ": did you mean …?" for the most similar of the possible words; nothing if none is similar."""
    similar = difflib.get_close_matches(word, list(possible), n=1)
    return f": did you mean {similar[0]}?" if similar else ""


def _convert_fields(option: Option, value: Any) -> dict[str, Any]:
    """Convert a mapping of the fields of a dataclass."""
    known = ", ".join(option.fields)
    if not isinstance(value, dict):
        raise ValueError(f"{option.label} must be a mapping of {known}, not {value!r}")
    for name in value:
        if name not in option.fields:
            raise ValueError(f"{option.label} has {known}, not {name}{suggest(str(name), option.fields)}")
    return {name: convert_value(option.fields[name], item) for name, item in value.items()}


def _wrong(option: Option, value: Any) -> ValueError:
    """Make the error for a value that is not of the option's type."""
    hint = suggest(str(value), map(str, option.choices)) if option.choices else ""
    return ValueError(f"{option.label} must be {option.kind}, not {value!r}{hint}")

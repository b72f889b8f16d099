"""The options of a command, read from the signature and the docstring of its function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

REQUIRED = inspect.Parameter.empty
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    str: "text",
    dict: "a mapping",
}
METAVARS = {int: "NUMBER", float: "NUMBER", Path: "PATH", str: "NAME", dict: "'{NAME: VALUE, …}'", bool: "true|false"}


@dataclass(frozen=True)
class Option:
    """One option of a command, or a field of one (`--execution.engine`), or a positional argument.

    hint: the type of its value. default: REQUIRED for a positional argument. text: what the docstring says of it.
    """

    name: str
    hint: Any
    default: Any = None
    text: str = ""

    @property
    def is_positional(self) -> bool:
        """Tell whether the command line gives it without a name."""
        return self.default is REQUIRED

    @property
    def is_switch(self) -> bool:
        """Tell whether its name alone means true."""
        return self.hint is bool

    @property
    def value_type(self) -> Any:
        """Return the type of its value, or of each of its values; None as a value is left out."""
        return get_args(self.list_type)[0] if self.list_type else _without_none(self.hint)

    @property
    def list_type(self) -> Any:
        """Return the type of its list, if it takes several values; None otherwise."""
        hint = _without_none(self.hint)
        return hint if get_origin(hint) is list else None

    @property
    def is_mapping(self) -> bool:
        """Tell whether it is a mapping, one key of which is `--option.key VALUE`."""
        return get_origin(self.value_type) is dict

    @property
    def may_be_none(self) -> bool:
        """Tell whether None is a value of it."""
        return type(None) in get_args(self.hint)

    @property
    def fields(self) -> dict[str, Option]:
        """Return the options of its fields, for one whose value is a dataclass; empty for others."""
        if not is_dataclass(self.hint):
            return {}
        hints, texts = get_type_hints(self.hint), read_argument_texts(self.hint.__doc__)
        return {
            field.name: Option(
                f"{self.name}.{field.name}",
                hints[field.name],
                None if field.default is MISSING else field.default,
                texts.get(field.name, ""),
            )
            for field in fields(self.hint)
        }

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return the values that it may have, where they are listed; empty otherwise."""
        return get_args(self.value_type) if get_origin(self.value_type) is Literal else ()

    @property
    def kind(self) -> str:
        """Say in words what a value of it must be."""
        if self.choices:
            return " or ".join(filter(None, (", ".join(map(str, self.choices[:-1])), str(self.choices[-1]))))
        return KINDS[dict if self.is_mapping else self.value_type]

    @property
    def metavar(self) -> str:
        """Return the word that stands for its value in the help; empty for a switch."""
        if self.is_switch:
            return ""
        name = "|".join(map(str, self.choices)) or METAVARS[dict if self.is_mapping else self.value_type]
        return f"{name} …" if self.list_type else name

    @property
    def label(self) -> str:
        """Return its name as users write it: `--batch-size`, or `RUN` for a positional argument."""
        name, dot, key = self.name.partition(".")
        return self.name.upper() if self.is_positional else f"--{name.replace('_', '-')}{dot}{key}"


# Options that every command has besides those of its function.
CONFIG = Option("config", Path, None, "a YAML file with any of these options; those on the command line override it")
TRUST_CODE = Option("trust_code", bool, False, "let the file of --config name functions to import")
THREADS = Option(
    "threads",
    int | None,
    None,
    "threads of the CPU; by default OMP_NUM_THREADS, or the cores that this process may use; small networks get one",
)


def read_options(function: Callable[..., Any]) -> dict[str, Option]:
    """Read the options of a command, by name: those of its function, then `trust_code` and `threads`."""
    hints, texts = get_type_hints(function), read_argument_texts(function.__doc__)
    options = {
        name: Option(name, hints[name], parameter.default, texts.get(name, ""))
        for name, parameter in inspect.signature(function).parameters.items()
    }
    return {**options, **{option.name: option for option in (TRUST_CODE, THREADS) if option.name not in options}}


def read_summary(function: Callable[..., Any]) -> str:
    """Return the first line of a function's docstring."""
    return (function.__doc__ or "").strip().partition("\n")[0]


def read_argument_texts(docstring: str | None) -> Mapping[str, str]:
    """Read what the section "Args:" of a docstring says of each argument, in one line each."""
    section = inspect.cleandoc(docstring or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^ {4}(?=\w+: )", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, _, text in (entry.partition(": ") for entry in entries)}


def _without_none(hint: Any) -> Any:
    """Return a type without None as an alternative."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (other,) = (option for option in get_args(hint) if option is not type(None))
    return other

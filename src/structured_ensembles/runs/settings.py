"""Settings of an experiment: their checks before any work, their comparison without defaults, folder names."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from structured_ensembles.common.checks import check_choice, check_share
from structured_ensembles.methods import METHODS, deep_ensemble, structured_ensemble
from structured_ensembles.training import Execution

USUAL_PRUNE = 0.5  # of every method that prunes, without `prune` and `memory`
USUAL_INITIAL = "N(0,1)"  # of a structured ensemble whose network is not trained, without `initial`
# Methods that forward their arguments to another function, and the defaults that they change.
FORWARDED: dict[Callable[..., Any], tuple[Callable[..., Any], dict[str, Any]]] = {
    METHODS["random"]: (structured_ensemble, {"selection": "random"}),
    METHODS["single"]: (deep_ensemble, {}),
}
COMMON = ("model", "data", "members", "recipe", "seed", "device", "folder", "quiet")  # arguments of every method
OPTIONAL = ("execution", "on_epoch")  # arguments of all our methods, which a user's method may lack
LONGEST = 150  # characters of a folder's name


@dataclass(frozen=True)
class Defaults:
    """Default arguments of a model and of a method, and default fields of a recipe and of an execution."""

    model_arguments: Mapping[str, Any]
    method_arguments: Mapping[str, Any]
    changes: Mapping[str, Any]
    execution: Mapping[str, Any] = field(default_factory=lambda: Execution().to_dict())

    def comparable(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration without defaults, so that a default given explicitly is the same run."""
        plain = {name: normalize_name(config[name]) for name in ("model", "method")}
        changed = {name: self.changed(config, name) for name in vars(self) if name in config}
        compared = {**config, **plain, **changed}
        if not compared.get("execution"):  # configurations have no default execution
            compared.pop("execution", None)
        return compared

    def changed(self, config: Mapping[str, Any], section: str) -> dict[str, Any]:
        """Return the non-default settings of a section of the configuration, such as "changes"."""
        settings, usual = dict(config[section]), self._usual(config, section)
        return {
            name: settings[name]
            for name in sorted(settings)
            if name not in usual or not _equal(settings[name], usual[name])
        }

    def resolved(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model and of the method as JSON holds them, those left at their defaults too.

        Without those that other entries of a configuration give, and defaults of None.
        """
        arguments: dict[str, dict[str, Any]] = {}
        for section in ("model_arguments", "method_arguments"):
            usual = self._usual(config, section).items()
            defaults = {name: value for name, value in usual if name not in (*COMMON, *OPTIONAL) and value is not None}
            arguments[section] = {**defaults, **config[section]}
        return dict(json.loads(json.dumps(arguments, default=str)))

    def _usual(self, config: Mapping[str, Any], section: str) -> dict[str, Any]:
        """Return the defaults of a section, where None stands for a value with that value."""
        usual = dict(getattr(self, section))
        if usual.get("prune", 0) is None and config[section].get("memory") is None:
            usual["prune"] = USUAL_PRUNE
        if usual.get("initial", 0) is None:  # the networks of experiments start untrained
            usual["initial"] = USUAL_INITIAL
        return usual


def read_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a function's arguments; of a class, with those of its base classes."""
    target, changed = FORWARDED.get(function, (function, {}))
    makers = reversed(list_makers(target))
    parameters = [parameter for maker in makers for parameter in inspect.signature(maker).parameters.values()]
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    return {**defaults, **changed}


def check_method_arguments(method: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError for arguments that a method does not have, or values that it cannot take."""
    function = FORWARDED.get(make, (make, {}))[0]
    check_arguments(f"method {method!r}", function, arguments, {*COMMON, *OPTIONAL})
    if function not in METHODS.values():
        return
    hints = get_type_hints(function)
    for name, value in arguments.items():
        if possible := _choices(hints.get(name)):
            check_choice(name, value, possible)
    prune, memory = arguments.get("prune"), arguments.get("memory")
    if prune is not None:
        check_share("prune", prune)
        if memory is not None:
            raise ValueError(
                f"prune and memory exclude each other, not prune={prune!r} with memory={memory!r}: give one"
            )


def check_arguments(
    role: str, function: Callable[..., Any], arguments: Mapping[str, Any], reserved: Collection[str]
) -> None:
    """Raise a ValueError for arguments that a function does not take, and name those that it does.

    role: what the function is, such as "method 'deep'". reserved: arguments that other settings give it.
    """
    makers = list_makers(function)
    parameters = [parameter for maker in makers for parameter in inspect.signature(maker).parameters.values()]
    last = inspect.signature(makers[0]).parameters.values()  # of a class, its base classes come after it
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in last) and not inspect.isclass(function)
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "self"]
    possible = sorted({*named} - {*reserved})
    unknown = sorted(name for name in arguments if name in reserved or (name not in possible and not takes_any))
    if unknown:
        listed = f"it has {', '.join(possible)}" if possible else "it has no arguments of its own"
        raise ValueError(f"{role} has no argument {' and '.join(map(repr, unknown))}: {listed}")
    required = [p.name for p in last if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [name for name in required if name not in {*arguments, *reserved} and name != "self"]
    if missing:
        raise ValueError(f"{role} also needs {' and '.join(map(repr, missing))} among its arguments")


def list_makers(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """List the functions that take the arguments: of a class, its `__init__` and those of its base classes."""
    if not inspect.isclass(function):
        return [function]
    return [vars(base)["__init__"] for base in function.__mro__[:-1] if "__init__" in vars(base)] or [function]


def takes_execution(method: Callable[..., Any]) -> bool:
    """Tell whether a method takes execution=, as all of ours do and a user's method may."""
    parameters = inspect.signature(method).parameters
    return "execution" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def make_folder_name(start: list[str], changed: Mapping[str, Any], seed: int) -> str:
    """Make a name for a run folder. start: its first words. changed: the non-default settings, by name."""
    words = [normalize_name(word) for word in start] + [
        f"{name}={_format_value(value)}" for name, value in changed.items()
    ]
    joined = "-".join([*words, str(seed)])
    name = re.sub(r"[^\w.=,+-]", ".", joined.replace(":", "."))
    if name == joined.replace(":", ".") and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(json.dumps([start, dict(changed), seed], default=str).encode()).hexdigest()[:10]
    return f"{name[:LONGEST]}-{digest}"


def normalize_name(name: str) -> str:
    """Write a name of ours with dashes, which `find_function` takes either way; leave a user's function as it is."""
    return name if ":" in name else name.replace("_", "-")


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def _equal(first: Any, second: Any) -> bool:
    """Tell whether two values are the same in a configuration: 1 and 1.0, (1, 2) and [1, 2], but not 1 and True."""
    first, second = (json.loads(json.dumps(value, default=str)) for value in (first, second))
    return bool(first == second) and isinstance(first, bool) == isinstance(second, bool)


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a `Literal`, possibly with None, allows; empty for other types."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(get_origin(option) is not Literal and option is not type(None) for option in options):
        return ()
    return tuple(value for option in options for value in get_args(option) or (None,))

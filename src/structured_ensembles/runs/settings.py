"""Settings of an experiment: checked before any work, compared without their defaults, and put into a folder's name."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from structured_ensembles.common.checks import check_choice, check_share
from structured_ensembles.methods import METHODS, deep_ensemble, structured_ensemble
from structured_ensembles.training import Execution

USUAL_PRUNE = 0.5  # of every method that prunes and is told neither `prune` nor `memory`
# Methods that hand their arguments on, and what they change about the defaults.
HANDED_ON: dict[Callable[..., Any], tuple[Callable[..., Any], dict[str, Any]]] = {
    METHODS["random"]: (structured_ensemble, {"selection": "random"}),
    METHODS["single"]: (deep_ensemble, {}),
}
COMMON = ("model", "data", "members", "recipe", "seed", "device", "folder", "quiet")  # arguments of every method
OPTIONAL = ("execution", "on_epoch")  # arguments of all our methods, which a user's own need not have
LONGEST = 150  # characters of a folder's name


@dataclass(frozen=True)
class Defaults:
    """Default arguments of a model and of a method, and default parts of a recipe and of an execution."""

    model_arguments: Mapping[str, Any]
    method_arguments: Mapping[str, Any]
    changes: Mapping[str, Any]
    execution: Mapping[str, Any] = field(default_factory=lambda: Execution().to_dict())

    def comparable(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration without the defaults, so that one given explicitly makes no other run."""
        plain = {name: plain_name(config[name]) for name in ("model", "method")}
        told = {name: self.told(config, name) for name in vars(self) if name in config}
        compared = {**config, **plain, **told}
        if not compared.get("execution"):  # configurations have none if nothing about it is said
            compared.pop("execution", None)
        return compared

    def told(self, config: Mapping[str, Any], part: str) -> dict[str, Any]:
        """Of a part of the configuration, such as "changes", what is not the default."""
        own, usual = dict(config[part]), dict(getattr(self, part))
        if usual.get("prune", 0) is None and own.get("memory") is None:
            usual["prune"] = USUAL_PRUNE
        return {name: own[name] for name in sorted(own) if name not in usual or not _equal(own[name], usual[name])}


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a function's arguments; of a class, those of the classes it is derived from too."""
    handed_on, changed = HANDED_ON.get(function, (function, {}))
    makers = [handed_on]
    if inspect.isclass(handed_on):
        makers = [vars(own)["__init__"] for own in reversed(handed_on.__mro__[:-1]) if "__init__" in vars(own)]
    parameters = [one for maker in makers for one in inspect.signature(maker).parameters.values()]
    found = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    return {**found, **changed}


def check_method_arguments(method: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError for arguments that a method does not have, or values that it cannot take."""
    function = HANDED_ON.get(make, (make, {}))[0]
    signature = inspect.signature(function)
    try:
        if taken := sorted(arguments.keys() & {*COMMON, *OPTIONAL}):
            raise TypeError(f"{', '.join(taken)} cannot be among them")
        signature.bind(**dict.fromkeys(COMMON), **arguments)
    except TypeError as error:
        raise ValueError(f"method {method!r} does not take these arguments: {error}") from error
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
            raise ValueError("give either prune or memory, the one or the other")


def takes_execution(method: Callable[..., Any]) -> bool:
    """Tell whether a method takes execution=, as all of ours do and a user's own may."""
    parameters = inspect.signature(method).parameters
    return "execution" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def folder_name(start: list[str], told: Mapping[str, Any], seed: int) -> str:
    """A name for a run folder. start: what it begins with. told: what differs from the defaults, by name."""
    parts = [plain_name(own) for own in start] + [f"{name}={_text(value)}" for name, value in told.items()]
    whole = "-".join([*parts, str(seed)])
    name = re.sub(r"[^\w.=,+-]", ".", whole.replace(":", "."))
    if name == whole.replace(":", ".") and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(json.dumps([start, dict(told), seed], default=str).encode()).hexdigest()[:10]
    return f"{name[:LONGEST]}-{digest}"


def plain_name(name: str) -> str:
    """A name of ours with dashes, as `find_function` takes it either way; a user's own function as it is."""
    return name if ":" in name else name.replace("_", "-")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def _equal(one: Any, other: Any) -> bool:
    """Tell whether two values are the same in a configuration: 1 and 1.0, (1, 2) and [1, 2], but not 1 and True."""
    one, other = (json.loads(json.dumps(own, default=str)) for own in (one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a `Literal` allows, or None besides; nothing for other types."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(get_origin(option) is not Literal and option is not type(None) for option in options):
        return ()
    return tuple(value for option in options for value in get_args(option) or (None,))

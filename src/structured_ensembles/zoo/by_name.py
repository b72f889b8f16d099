"""Models by name: one of the zoo, or the user's `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_ensembles import zoo
from structured_ensembles.common.checks import check_type
from structured_ensembles.networks.provenance import ATTRIBUTE, Origin

Trust = bool | Collection[str]  # which functions that a file names may be called: all, none, or the listed ones


def is_trusted(name: str, trust_code: Trust) -> bool:
    """Tell whether a name from a file may be used: one without code of the user, or one that the caller trusts."""
    if ":" not in name or isinstance(trust_code, bool):
        return ":" not in name or bool(trust_code)
    return name in ([trust_code] if isinstance(trust_code, str) else trust_code)


def from_factory(function: str, /, **arguments: Any) -> nn.Module:
    """Make a network by calling `package.module:function` with the arguments; files of the network record both.

    `Ensemble.load(path, trust_code=True)` then makes the network again, wherever the function can be imported; a file
    without this record needs `model=`. The arguments must be JSON values: numbers, strings, lists, dicts.
    """
    check_type("function", function, str, 'such as "package.module:function"')
    module, colon, name = function.partition(":")
    if not (module and colon and name) or module == "__main__":
        raise ValueError(
            "function must be 'package.module:function', and other programs must be able to import it, not "
            f"{function!r}"
        )
    try:
        recorded = json.loads(json.dumps(arguments))
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments of {function} must be what a file can record as JSON: {error}") from error
    if recorded != arguments:
        raise ValueError(f"arguments of {function} must be what a file can record as JSON, such as {recorded}")
    return build_model(function, **arguments)


def build_model(name: str, /, **arguments: Any) -> nn.Module:
    """Make a network by name, such as `build_model("resnet20", num_classes=10)`; it remembers how it was made."""
    function = find_model(name)
    check_accepted(name, function, arguments)
    if ":" in name:
        model = function(**arguments)
    else:
        try:
            model = function(**arguments)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"model {name!r} cannot be made with {arguments}: {error}") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {name!r} gave a {type(model).__name__}, not a torch.nn.Module")
    setattr(model, ATTRIBUTE, Origin(name, dict(arguments)))
    return model


def check_accepted(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the function of a model's name can be called with these arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError:
        accepted = ", ".join(signature.parameters) or "none"
        shown = ", ".join(map(repr, arguments)) or "none"
        hint = f"; sens takes them as --model-arguments '{{{accepted.partition(',')[0]}: …}}'" if not arguments else ""
        raise ValueError(f"model {name!r} takes the arguments {accepted}, but was given {shown}{hint}") from None


def find_model(name: str) -> Callable[..., Any]:
    """Return the function that makes the network of this name."""
    return find_function("model", name, {known: getattr(zoo, known) for known in zoo.__all__})


def find_function(
    role: str, name: str, known: Mapping[str, Callable[..., Any]], kind: str = "function"
) -> Callable[..., Any]:
    """Return a known function (`half-vgg11` is half_vgg11), or import the user's `package.module:function`.

    role, kind: what the function is for, such as "model", and "function" or "class", for the error message.
    """
    if ":" not in name:
        by_name = {alias.replace("-", "_"): function for alias, function in known.items()}
        if name.replace("-", "_") not in by_name:
            raise ValueError(f"{role} must be one of {', '.join(known)}, or package.module:{kind}, not {name!r}")
        return by_name[name.replace("-", "_")]
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's module, which may raise anything
        reason = error if isinstance(error, ImportError | AttributeError | ValueError) else repr(error)
        raise ValueError(f"{role} {name!r} cannot be imported: {reason}{_import_hint(module, error)}") from error
    if not callable(function) or isinstance(function, nn.Module):  # a network can be called, but makes none
        raise ValueError(f"{role} {name!r} is not a {kind}")
    return function  # type: ignore[no-any-return]


def _import_hint(module: str, error: Exception) -> str:
    """Say what to do about a failed import, if we know it."""
    package = module.partition(".")[0]
    here = Path(f"{package}.py").exists() or Path(package).is_dir()
    if isinstance(error, ModuleNotFoundError) and error.name == package and here:
        return "; it is in the current folder, where functions that a file names are found with PYTHONPATH=. only"
    return torchvision_hint(error)


def torchvision_hint(error: BaseException) -> str:
    """Say what to do if an import failed since torchvision was built for another torch; "" for any other error.

    timm and transformers import torchvision, and may replace its error by one of their own.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and "torchvision::" in str(cause):
            return (
                f"; the installed torchvision was built for another version than torch {torch.__version__}: install "
                "the one that belongs to it, or uninstall torchvision if the model does not need it"
            )
        cause = cause.__cause__ or cause.__context__
    return ""

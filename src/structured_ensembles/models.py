"""Models by name: the zoo's, or `package.module:function` of the user's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from structured_ensembles import zoo
from structured_ensembles.origin import ATTRIBUTE, Origin


def build_model(name: str, **arguments: Any) -> nn.Module:
    """Make a network by name, such as `build_model("resnet20", num_classes=10)`; it remembers how it was made."""
    function = find_function(name)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(function).parameters)
        raise ValueError(f"model {name!r} takes the arguments {takes}: {error}") from error
    model = function(**arguments)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {name!r} gave a {type(model).__name__}, not a torch.nn.Module")
    setattr(model, ATTRIBUTE, Origin(name, dict(arguments)))
    return model


def find_function(name: str, kind: str = "model") -> Callable[..., Any]:
    """A function of the zoo (`half-vgg11` is half_vgg11), or the user's own by `package.module:function`."""
    if ":" not in name:
        known = name.replace("-", "_")
        if kind != "model" or known not in zoo.__all__:
            names = ", ".join(sorted(zoo.__all__)) if kind == "model" else "its own list"
            raise ValueError(f"{kind} must be one of {names}, or package.module:function, not {name!r}")
        return getattr(zoo, known)  # type: ignore[no-any-return]
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{kind} {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{kind} {name!r} is not a function")
    return found  # type: ignore[no-any-return]

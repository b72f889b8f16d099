"""Outputs of a network: the tensor that losses and predictions use, picked from what the network returns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

NAMES = ("logits", "out")  # the usual names: of transformers, of torchvision's segmentation
logger = logging.getLogger(__name__)


def pick_logits(outputs: Any) -> Any:
    """Return the logits of a network's outputs, (batch, …); outputs that do not tell which they are stay as they are.

    A dict, a named tuple or a `ModelOutput` of transformers has them under one of `NAMES`. Otherwise they are the only
    tensor in it, such as in the tuple (logits, cache). What was picked is logged, once.
    """
    if isinstance(outputs, Tensor) or not isinstance(outputs, Mapping | tuple | list):
        return outputs
    named = outputs if isinstance(outputs, Mapping) else getattr(outputs, "_asdict", dict)()
    for name in NAMES:
        if isinstance(named.get(name), Tensor):
            _log_once(f"the network returns a {type(outputs).__name__}: its {name!r} are used as the logits")
            return named[name]
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == 1:
        _log_once(f"the network returns a {type(outputs).__name__}: its only tensor is used as the logits")
        return tensors[0]
    return outputs


@cache
def _log_once(message: str) -> None:
    """Log what was picked, once in a process: every batch would repeat it."""
    logger.info(message)

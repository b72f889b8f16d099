"""Outputs of a network: the tensor that losses and predictions use, picked from what the network returns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from structured_ensembles.common.logs import log_once

NAMES = ("logits", "out")  # the usual names: of transformers, of torchvision's segmentation
logger = logging.getLogger(__name__)


def pick_logits(outputs: Any) -> Any:
    """Return the logits of a network's outputs, (batch, …); outputs that do not tell which they are stay as they are.

    A dict, a named tuple or a `ModelOutput` of transformers has them under one of `NAMES`. Otherwise they are the only
    tensor in it, such as in the tuple (logits, cache). What was picked is logged, once.
    """
    if isinstance(outputs, Tensor) or not isinstance(outputs, Mapping | tuple | list):
        return outputs
    kind = type(outputs).__name__
    named = outputs if isinstance(outputs, Mapping) else getattr(outputs, "_asdict", dict)()
    for name in NAMES:
        if isinstance(named.get(name), Tensor):
            log_once(logger, f"the network returns a {kind}: its {name!r} are used as the logits", logging.INFO)
            return named[name]
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == 1:
        log_once(logger, f"the network returns a {kind}: its only tensor is used as the logits", logging.INFO)
        return tensors[0]
    return outputs

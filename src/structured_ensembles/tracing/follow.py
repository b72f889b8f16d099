"""Find the rule for an operation and apply it."""

import torch

from structured_ensembles.tracing import shape_rules  # noqa: F401 (registers its rules, as layer_rules does)
from structured_ensembles.tracing.layer_rules import pointwise
from structured_ensembles.tracing.rules import RULES, Call, Result, unknown


def follow(call: Call) -> Result:
    """Apply the rule for `call`, or fix what it touches."""
    name = call.name.removesuffix("_")
    if name in RULES:
        return RULES[name](call)
    if torch.Tag.pointwise in getattr(call.apply, "tags", ()):
        return pointwise(call)
    return unknown(call, f"{call.name} is not understood")

"""Choice of the rule for an operation."""

import torch

from structured_ensembles.tracing import (  # noqa: F401 (they register their rules, as layer_rules does)
    index_rules,
    patch_rules,
    product_rules,
    recurrent_rules,
    shape_rules,
)
from structured_ensembles.tracing.layer_rules import pointwise
from structured_ensembles.tracing.rules import RULES, Call, Result, fix_unknown


def follow(call: Call) -> Result:
    """Apply the rule for `call`; without a rule, fix all channels that it touches."""
    name = call.name if call.name.startswith("__") else call.name.removesuffix("_")
    if name in RULES:
        return RULES[name](call)
    if torch.Tag.pointwise in getattr(call.apply, "tags", ()):
        return pointwise(call)
    return fix_unknown(call, f"{call.name} is not understood")

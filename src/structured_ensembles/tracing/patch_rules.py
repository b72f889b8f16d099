"""Rules for patches of images: `nn.Unfold` (im2col) and `nn.Fold` (col2im)."""

from __future__ import annotations

import math

from structured_ensembles.tracing.layout import Value, fix, fixed_layout, new_layout, repeat_positions, unify
from structured_ensembles.tracing.rules import Call, Result, rule


@rule("im2col")
def im2col(call: Call) -> Result:
    """Repeat every channel for the pixels of a patch, which come after it; the patches are positions."""
    inputs, pixels = call["self"], math.prod(call["kernel_size"])
    channel = len(inputs.shape) - 3
    for dim in inputs.dims[-2:]:
        fix(dim, "im2col runs over it")
    taken = repeat_positions(inputs.dims[channel], pixels)
    return Value(call.shape, (*inputs.dims[:channel], taken, fixed_layout(call.shape[-1])))


@rule("col2im")
def col2im(call: Call) -> Result:
    """Give the image one channel for the pixels of a patch; where patches overlap, those of one channel are added."""
    inputs, pixels = call["self"], math.prod(call["kernel_size"])
    channel = len(inputs.shape) - 2
    channels = call.shape[channel]
    written = new_layout(channels) if channels > 1 else fixed_layout(1)
    unify(inputs.dims[channel], repeat_positions(written, pixels))
    fix(inputs.dims[-1], "col2im runs over it")
    return Value(call.shape, (*inputs.dims[:channel], written, *map(fixed_layout, call.shape[-2:])))

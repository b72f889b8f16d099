"""Passes: functions Program → Program, each with a test of its own; compilation.py runs them in order."""

from __future__ import annotations

from structured_ensembles.cuda.passes.convolutions import fuse_convolutions
from structured_ensembles.cuda.passes.counters import collect_counters
from structured_ensembles.cuda.passes.inplace import remove_inplace
from structured_ensembles.cuda.passes.layers import replace_dropout, replace_layers
from structured_ensembles.cuda.passes.norms import fuse_norms, fuse_running_norms
from structured_ensembles.cuda.passes.prediction import fuse_predictions, share_inputs
from structured_ensembles.cuda.passes.rank_one import add_factors
from structured_ensembles.cuda.passes.scales import add_scales, fuse_scales
from structured_ensembles.cuda.passes.stack import stack_members
from structured_ensembles.cuda.passes.subsampling import fuse_subsampling

__all__ = [
    "add_factors", "add_scales", "collect_counters", "fuse_convolutions", "fuse_norms", "fuse_predictions",
    "fuse_running_norms", "fuse_scales", "fuse_subsampling", "remove_inplace", "replace_dropout", "replace_layers",
    "share_inputs", "stack_members",
]  # fmt: skip

"""Memory of a learner, in floats and bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from structured_ensembles.common.checks import check_flags


@dataclass(frozen=True)
class Memory:
    """Memory of a learner; heads are counted apart, as the paper's table leaves them out.

    backbone: floats that all tasks share. factors: floats of single tasks (rank-one factors, separate networks).
    masks: bits of the tasks' masks, counted as the paper does, one mask per task. stored_masks: bits in the file, where
        another encoding is shorter. heads: floats.
    """

    backbone: int
    factors: int = 0
    masks: int = 0
    heads: int = 0
    stored_masks: int | None = None

    def bits(self, float_bits: int = 32, heads: bool = True) -> int:
        """Return the total number of bits, as stored."""
        check_flags(heads=heads)
        floats = self.backbone + self.factors + (self.heads if heads else 0)
        return floats * float_bits + (self.masks if self.stored_masks is None else self.stored_masks)

    def bytes(self, heads: bool = True) -> int:
        """Return the total number of bytes with floats of four bytes."""
        return math.ceil(self.bits(32, heads) / 8)

    @property
    def task_bytes(self) -> float:
        """Return the bytes for tasks: besides one backbone, and without heads."""
        return (self.bits(heads=False) - 32 * self.backbone) / 8

    def to_dict(self) -> dict[str, int]:
        """Return the memory as `result.json` has it."""
        stored = self.masks if self.stored_masks is None else self.stored_masks
        return {**vars(self), "stored_masks": stored, "bytes": self.bytes(), "bytes_without_heads": self.bytes(False)}


def count_floats(module: nn.Module) -> int:
    """Count the floats that a module stores: its parameters and floating-point buffers."""
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]
    return sum(tensor.numel() for tensor in tensors)


def paper_memory(backbone: nn.Module, tasks: int) -> dict[str, Memory]:
    """Compute each method's memory by the paper's formulas, for any backbone, without heads.

    They give Pruning a mask over all weights. CLNP in its own paper, and `PruningLearner`, mask neurons instead:
    `learner.memory()` returns the actual memory.
    """
    layers = [module for module in backbone.modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)]
    shapes = [module.weight.shape for module in layers]
    base = count_floats(backbone)
    neurons = sum(shape[0] for shape in shapes)
    factors = sum(shape[0] + shape[1] for shape in shapes)
    return {
        "naive": Memory(base),
        "single": Memory(base, factors=(tasks - 1) * base),
        "supsup": Memory(base, masks=tasks * base),
        "pruning": Memory(base, masks=tasks * base),
        "batch-ensemble": Memory(base, factors=tasks * factors),
        "structured": Memory(base, masks=tasks * neurons),
    }

"""Copy many pairs of tensors at a time: on a GPU in one launch, which reads a table of pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from structured_ensembles.cuda.launch import launch

PIECE = 1024  # numbers that are copied by one program, at most
MAX_PIECES = 4096  # of one tensor; a table of more would cost more than it saves


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy with one kernel for all pairs of the same strides; others, such as views of padded ones, take one each."""
    pairs = list(zip(targets, sources, strict=True))
    same_strides = [(target, source) for target, source in pairs if target.stride() == source.stride()]
    if same_strides:
        torch._foreach_copy_([target for target, _ in same_strides], [source for _, source in same_strides])
    for target, source in pairs:
        if target.stride() != source.stride():
            target.copy_(source)


def copier(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Return a function that copies the second of each pair to the first: on a GPU all in one launch.

    The tensors must stay where they are in memory. Sources in float32 whose targets are bfloat16 or float32 share the
    launch, cut into pieces.
    """
    if not pairs or not pairs[0][0].is_cuda or find_spec("triton") is None:
        return lambda: copy_all(*zip(*pairs, strict=True)) if pairs else None
    rows: list[tuple[int, ...]] = []
    others: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        pieces = _pieces(target, source)
        if source.dtype != torch.float32 or target.dtype not in (torch.float32, torch.bfloat16) or pieces is None:
            others.append((target, source))
            continue
        narrow, size = int(target.dtype == torch.bfloat16), target.element_size()
        rows += [
            (source.data_ptr() + 4 * source_at, target.data_ptr() + size * target_at, numbers, narrow, *shape)
            for source_at, target_at, numbers, *shape in pieces
        ]
    device = pairs[0][0].device
    table = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else 0).T.contiguous().to(device)
    like = torch.empty(1, dtype=torch.bfloat16, device=device)

    def copy() -> None:
        from structured_ensembles.cuda.kernels.copying import copy_pieces

        if rows:
            launch(copy_pieces, (len(rows),), table, like, len(rows), BLOCK=PIECE)
        if others:
            copy_all(*zip(*others, strict=True))

    return copy


def _pieces(target: Tensor, source: Tensor) -> list[tuple[int, ...]] | None:
    """Cut two tensors of one shape into pieces of at most `PIECE` numbers, as `copy_pieces` reads them.

    Of each piece: where it begins in source and target, how many numbers it has, the length of a row, the step within a
    row of the source, and the steps from row to row in both. None if no axis of the target has adjacent numbers, or if
    there would be more than `MAX_PIECES`.
    """
    if source.numel() == 0:
        return []
    axes = _merged_axes(target, source)
    length, step, adjacent = axes.pop() if axes else (1, 1, 1)
    if adjacent != 1:
        return None
    if length > PIECE // 2 or not axes:  # long rows, a few pieces for each
        rows, source_row, target_row = 1, 0, 0
    else:
        rows, source_row, target_row = axes.pop()
    starts = [(0, 0)]
    for size, source_step, target_step in axes:
        starts = [(a + n * source_step, b + n * target_step) for a, b in starts for n in range(size)]
        if len(starts) > MAX_PIECES:
            return None
    if rows == 1:
        cuts = [(first * step, first, min(PIECE, length - first)) for first in range(0, length, PIECE)]
        shapes = [(begin, at, numbers, numbers, step, 0, 0) for begin, at, numbers in cuts]
    else:
        high = PIECE // length
        shapes = [
            (
                first * source_row,
                first * target_row,
                min(high, rows - first) * length,
                length,
                step,
                source_row,
                target_row,
            )
            for first in range(0, rows, high)
        ]
    if len(starts) * len(shapes) > MAX_PIECES:
        return None
    return [(a + begin, b + at, *rest) for a, b in starts for begin, at, *rest in shapes]


def _merged_axes(target: Tensor, source: Tensor) -> list[tuple[int, int, int]]:
    """List the axes of two tensors, innermost of the target last: size, step in the source, step in the target.

    Neighbours that are one axis in both are merged.
    """
    strides = target.stride()
    order = sorted(range(source.dim()), key=lambda dim: (-strides[dim], dim))
    merged: list[tuple[int, int, int]] = []
    for dim in order:
        size, source_step, target_step = source.shape[dim], source.stride(dim), strides[dim]
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * source_step, size * target_step):
            size *= merged.pop()[0]
        merged.append((size, source_step, target_step))
    return merged

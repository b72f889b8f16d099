"""Stack the weights of members that share a program: one tensor (members, …) for each parameter and buffer.

Members may have different widths: each is padded with zeros to a common shape (see channel_padding.py), and the
gradients of the padding are dropped. Optimizers change the members' own parameters, which stay in float32; the stack
has copies, those of convolutions and linear layers in bfloat16 where the precision says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from structured_ensembles.cuda.launch import launch
from structured_ensembles.cuda.program import Program

PIECE = 1024  # numbers that are copied by one program, at most
MAX_PIECES = 4096  # of one tensor; a table of more would cost more than it saves


class Stack:
    """Copies of the members' parameters and buffers, by placeholder of the program.

    shapes: by qualified name, where they differ from those of the members: larger. bfloat16: the placeholders of
    weights that are cast. double: all in double precision, which programs are checked in.
    """

    def __init__(
        self,
        program: Program,
        networks: Sequence[nn.Module],
        shapes: Mapping[str, tuple[int, ...]],
        bfloat16: Collection[str] = (),
        *,
        double: bool = False,
    ) -> None:
        self.weights: dict[str, Tensor] = {}
        self.learned: set[str] = set()
        self.parameters: dict[str, list[nn.Parameter]] = {}
        self._copied: list[tuple[Tensor, Tensor]] = []  # stack's, member's
        self._statistics: list[tuple[Tensor, Tensor]] = []
        tables = [dict(network.named_parameters(remove_duplicate=False)) for network in networks]
        buffers = [dict(network.named_buffers(remove_duplicate=False)) for network in networks]
        for placeholder, name in program.names.items():
            if name in program.counters:  # advanced in the networks themselves
                continue
            is_parameter = name in tables[0]
            tensors = [table[name] for table in (tables if is_parameter else buffers)]
            shape = shapes.get(name, tuple(tensors[0].shape))
            dtype = torch.bfloat16 if placeholder in bfloat16 else tensors[0].dtype
            dtype = torch.float64 if double and dtype.is_floating_point else dtype
            stacked = _zeros(len(networks), shape, dtype, tensors[0].device)
            views = [unpadded(padded, tensor.shape) for padded, tensor in zip(stacked, tensors, strict=True)]
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor.detach())
            self.weights[placeholder] = stacked
            if is_parameter:
                self._copied += zip(views, (tensor.detach() for tensor in tensors), strict=True)
                if tensors[0].requires_grad:
                    self.learned.add(placeholder)
                    self.parameters[placeholder] = tensors  # type: ignore[assignment]
            else:
                self._statistics += zip(views, tensors, strict=True)
        self._copies = copier(self._copied)

    def refresh(self) -> None:
        """Copy the members' parameters into the stack, after they have changed."""
        self._copies()

    def reloader(self) -> Callable[[], None]:
        """Return a function that copies the members' parameters and buffers into the stack, all in one launch."""
        return copier(self._copied + self._statistics)

    def load_statistics(self) -> None:
        """Copy the members' buffers into the stack."""
        if self._statistics:
            copy_all(*zip(*self._statistics, strict=True))

    def store_statistics(self) -> None:
        """Copy the stack's buffers to the members."""
        if self._statistics:
            copy_all(*zip(*((member, stacked) for stacked, member in self._statistics), strict=True))

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Set the gradient of every parameter, in its type and layout; gradients: stacked, by placeholder."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for placeholder, parameters in self.parameters.items():
            if placeholder in gradients:
                stacked = gradients[placeholder].to(parameters[0].dtype)
                pairs += [(one, unpadded(padded, one.shape)) for one, padded in zip(parameters, stacked, strict=True)]
        assign_gradients(pairs)

    def tensors(self) -> list[Tensor]:
        """List all tensors of the stack, which a step changes."""
        return list(self.weights.values())


def unpadded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a view of a padded tensor without the padding at the end of its axes."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] != size:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def assign_gradients(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Set the gradient of the first of each pair, a parameter, to the second; of another type or layout, to a copy."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for parameter, gradient in pairs:
        if gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter)
            targets.append(parameter.grad)
            sources.append(gradient)
    copy_all(targets, sources)


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


def _zeros(members: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros (members, *shape); weights of convolutions have their inputs innermost in memory."""
    if len(shape) == 4:
        outputs, inputs, rows, taps = shape
        return torch.zeros(members, outputs, rows, taps, inputs, dtype=dtype, device=device).permute(0, 1, 4, 2, 3)
    return torch.zeros(members, *shape, dtype=dtype, device=device)

"""Stack the weights of members that share a program: one tensor (members, …) for each parameter and buffer.

Members may have different widths: each is padded with zeros to a common shape (see channel_padding.py), and the
gradients of the padding are dropped. Optimizers change the members' own parameters, which stay in float32; the stack
has copies, those of convolutions and linear layers in bfloat16 where the precision says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from structured_ensembles.cuda.pair_copies import copier, copy_all
from structured_ensembles.cuda.program import Program


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


def _zeros(members: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros (members, *shape); weights of convolutions have their inputs innermost in memory."""
    if len(shape) == 4:
        outputs, inputs, rows, taps = shape
        return torch.zeros(members, outputs, rows, taps, inputs, dtype=dtype, device=device).permute(0, 1, 4, 2, 3)
    return torch.zeros(members, *shape, dtype=dtype, device=device)

"""Evaluate a node of a program by PyTorch, and its gradients by autograd, of this node alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from structured_ensembles.cuda.operations import member_dropout
from structured_ensembles.cuda.program import Node

BATCH_NORM = torch.ops.aten.batch_norm.default


@dataclass(frozen=True)
class EvaluatedNode:
    """The result of a node, which autograd knows, and the leaves by which it reaches the node's arguments."""

    result: Any  # a tensor, or a tuple or list that has some
    leaves: Mapping[Node, Tensor]

    @property
    def has_gradients(self) -> bool:
        """Tell whether some argument has a gradient."""
        return bool(self.leaves) and any(
            isinstance(output, Tensor) and output.requires_grad for output in self._outputs
        )

    @property
    def detached(self) -> Any:
        """Return the result without what autograd keeps."""
        if isinstance(self.result, tuple | list):
            return tuple(output.detach() if isinstance(output, Tensor) else output for output in self.result)
        return self.result.detach() if isinstance(self.result, Tensor) else self.result

    def gradients(self, dy: Any) -> Iterator[tuple[Node, Tensor]]:
        """Yield arguments and their gradients. dy: that of the result; where this is a tuple, a dict by index."""
        several = isinstance(self.result, tuple | list)
        arrived = dy if several else {0: dy}
        pairs = [(y, arrived[number]) for number, y in enumerate(self._outputs) if arrived.get(number) is not None]
        outputs, gradients = zip(*pairs, strict=True)
        gradients = tuple(gradient.to(output.dtype) for gradient, output in zip(gradients, outputs, strict=True))
        of_leaves = torch.autograd.grad(outputs, list(self.leaves.values()), gradients, allow_unused=True)
        for argument, gradient in zip(self.leaves, of_leaves, strict=True):
            if gradient is not None:
                yield argument, gradient

    @property
    def _outputs(self) -> tuple[Any, ...]:
        """Return the result as a tuple."""
        return tuple(self.result) if isinstance(self.result, tuple | list) else (self.result,)


def evaluate_node(
    node: Node,
    value_of: Callable[[Node], Any],
    is_weight: Callable[[Node], bool],
    is_needed: Callable[[Node], bool],
) -> EvaluatedNode:
    """Compute a node by PyTorch. Dropout, which is evaluated only where it drops nothing, copies its input.

    value_of: returns the value of an argument; weights have an axis of members, which PyTorch's own operations do not
    know. is_needed: tells whether the gradient of an argument is.
    """
    leaves: dict[Node, Tensor] = {}
    is_ours = not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem

    def argument_value(argument: Node) -> Any:
        value = value_of(argument)
        if isinstance(value, Tensor) and is_needed(argument):
            if argument not in leaves:
                leaves[argument] = value.detach().requires_grad_()
            value = leaves[argument]
        return value[0] if is_weight(argument) and not is_ours else value

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument_value)
    if node.target is BATCH_NORM and args[5]:
        _check_values_per_channel(args[0])
    with torch.enable_grad():
        result = args[0].clone() if node.target is member_dropout else node.target(*args, **kwargs)
    return EvaluatedNode(result, leaves)


def _check_values_per_channel(x: Tensor) -> None:
    """Raise a ValueError for one value per channel, as `F.batch_norm` does; the operation that it calls returns NaN."""
    if x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")

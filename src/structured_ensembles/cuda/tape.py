"""Tape: the gradients of a program's values and weights, and the functions that compute them, in reverse order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.cuda.convolution import BlockSums
from structured_ensembles.cuda.program import Node
from structured_ensembles.cuda.side_stream import SideStream

Gradients = dict[str, Tensor]  # of weights, by the placeholders' names, (members, …)


class Tape:
    """What one pass through a program records for its backward pass.

    learned: the placeholders whose gradients are wanted. side: a stream beside the current one, see `SideStream`.
    """

    def __init__(self, learned: set[str], side: torch.cuda.Stream | None) -> None:
        self.learned, self.side = learned, SideStream(side)
        self.records: dict[Node, Callable[[Any], None]] = {}  # backward passes: functions of a value's gradient
        self.gradients: dict[Node, Any] = {}  # of values, as far as they have arrived
        self.ready: dict[Node, tuple[Tensor, BlockSums]] = {}  # gradients of the input of a norm's ReLU, and their sums
        self.weight_gradients: dict[str, list[Tensor]] = {}  # one for each use of a weight

    def is_needed(self, node: Node) -> bool:
        """Tell whether the gradient of a value, or of a weight, is needed."""
        return node in self.records or node.name in self.learned

    def must_record(self, node: Node) -> bool:
        """Tell whether a node needs a backward pass: it has a learned weight, or one comes before it."""
        return any(self.is_needed(argument) for argument in node.all_input_nodes)

    def record(self, node: Node, backward: Callable[[Any], None]) -> None:
        """Keep the backward pass of a node, a function of the gradient of its value, if it needs one."""
        if self.must_record(node):
            self.records[node] = backward

    def run(self, nodes: Sequence[Node], output: Node, gradient: Tensor) -> Gradients:
        """Return the gradients of the weights, given that of the output. nodes: in the order in which they ran."""
        self.gradients[output] = gradient
        for node in reversed(nodes):
            backward = self.records.pop(node, None)
            arrived = self.gradients.pop(node, None)
            if backward is not None and (arrived is not None or node in self.ready):
                backward(arrived)
        self.side.join()
        # Only now: until the streams have joined, the side stream may still compute a gradient.
        return {placeholder: reduce(operator.add, uses) for placeholder, uses in self.weight_gradients.items()}

    def add(self, node: Node, gradient: Tensor) -> None:
        """Add a gradient of a node's value, if it is needed."""
        if node in self.records:
            before = self.gradients.get(node)
            self.gradients[node] = gradient if before is None else before + gradient

    def add_item(self, node: Node, number: int, gradient: Tensor) -> None:
        """Add a gradient of one of the tensors that a node returns."""
        items = self.gradients.setdefault(node, {})
        items[number] = items[number] + gradient if number in items else gradient

    def add_weight(self, node: Node, gradient: Tensor) -> None:
        """Add a gradient of a weight: to a placeholder's, or to that of the node that has computed it."""
        if node.name in self.learned:
            self.add_learned(node.name, gradient)
            return
        if node in self.gradients:  # both may still be computed on the side stream
            self.side.join()
        self.add(node, gradient)

    def add_learned(self, placeholder: str, gradient: Tensor) -> None:
        """Note the gradient of one use of a weight; `run` sums them up."""
        self.weight_gradients.setdefault(placeholder, []).append(gradient)

"""Run a program forward and backward, on our kernels where they fit, else by PyTorch's autograd.

The way back is explicit: gradients of all values lie in one table, and nodes are taken in reverse order. So where a
value's gradient comes from a convolution last, the convolution's kernel adds what other readers of the value have
left, and computes what the batch norm before it needs (see convolution.py): no kernel of its own for either.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from structured_ensembles.cuda import batch_norm, convolution
from structured_ensembles.cuda.batch_norm import Norm
from structured_ensembles.cuda.convolution import BlockSums, NormBefore, Window
from structured_ensembles.cuda.operations import (
    conv_norm,
    member_conv,
    member_dropout,
    member_linear,
    member_norm,
    subsample,
)
from structured_ensembles.cuda.program import Node, Program

MOST_BESIDE = 2  # layers whose weights' gradients are computed beside the way back
Gradients = dict[str, Tensor]  # of weights, by the placeholders' names, (members, …)


class Run:
    """One pass through a program.

    weights: stacked tensors (members, …) by placeholder. learned: the placeholders whose gradients are wanted.
    generators: of the members, for dropout; None: no dropout.
    side: a stream on which the gradients of convolutions' weights are computed, beside the way back.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Tensor],
        learned: set[str],
        generators: Sequence[torch.Generator | None] | None,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        self.program, self.weights, self.learned, self.generators = program, weights, learned, generators
        self.values: dict[Node, Any] = {}
        self.records: dict[Node, Callable[[Any], None]] = {}
        self.gradients: dict[Node, Any] = {}
        self.ready: dict[Node, tuple[Tensor, BlockSums]] = {}  # gradients behind the ReLU of a norm, and their sums
        self.norms: dict[Node, NormBefore] = {}
        self.weight_gradients: dict[str, list[Tensor]] = {}  # one for each use of a weight
        self.side = side
        self._beside: deque[tuple[torch.cuda.Event, tuple[Tensor, Tensor]]] = deque()
        self.order = {node: number for number, node in enumerate(program.nodes)}

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute the output; inputs: the tensors of the network's inputs, (members × samples, …)."""
        given = dict(zip(self.program.inputs, inputs, strict=True))
        last_use = _last_uses(self.program)
        result: Tensor | None = None
        for node in self.program.nodes:
            if node.op == "placeholder":
                self.values[node] = given.get(node.name, self.program.constants.get(node.name))
            elif node.op == "output":
                result = self.values[self.program.output]
            else:
                self.values[node] = self._run(node)
            for done in last_use.get(node, ()):
                self.values.pop(done, None)
        assert result is not None
        return result

    def backward(self, gradient: Tensor) -> Gradients:
        """Return the gradients of the weights, given that of the output."""
        self.values.clear()
        self.gradients[self.program.output] = gradient
        for node in reversed(self.program.nodes):
            record = self.records.pop(node, None)
            arrived = self.gradients.pop(node, None)
            if record is not None and (arrived is not None or node in self.ready):
                record(arrived)
        self._join(0)
        self.norms.clear()  # of those that no gradient has reached
        # Only now: until all streams have joined, a gradient may still be computed beside.
        return {placeholder: reduce(operator.add, uses) for placeholder, uses in self.weight_gradients.items()}

    def _run(self, node: Node) -> Any:
        if node.target is conv_norm:
            x, weight = self.values[node.args[0]], self.weights[node.args[1].name]
            x = _channels_last(x, weight.dtype)
            window = Window(node.kwargs["stride"], node.kwargs["padding"])
            if convolution.fits(x, weight) and convolution.rows_per_member(x, weight, window) > 1:
                return self._conv_norm(node, x, weight, window)
        if node.target is member_norm:
            x = self.values[node.args[0]]
            if batch_norm.fits(x, self.program.members):
                return self._norm(node, x)
        if node.target is member_conv and node.args[2:] in ((), (None,)):
            x, weight = self.values[node.args[0]], self.weights[node.args[1].name]
            x = _channels_last(x, weight.dtype)
            if convolution.fits(x, weight):
                return self._conv(node, x, weight)
        if node.target is member_linear and self.program.members > 1:
            return self._linear(node)
        if node.target is subsample:
            x = _channels_last(self.values[node.args[0]])
            if batch_norm.fits(x, members=1):
                return self._subsample(node, x)
        return self._plain(node)

    # --- by our kernels

    def _conv(self, node: Node, x: Tensor, weight: Tensor) -> Tensor:
        window = Window(**node.kwargs)
        y, _ = convolution.forward(x, weight, window)
        if self._needed(node):
            self.records[node] = lambda dy: self._conv_backward(
                node, _channels_last(dy, weight.dtype), x, weight, window
            )
        return y

    def _conv_backward(self, node: Node, dy: Tensor, x: Tensor, weight: Tensor, window: Window) -> None:
        source, placeholder = node.args[0], node.args[1].name
        if placeholder in self.learned:
            self._add_weight_gradient(placeholder, self._weight_gradient(x, dy, weight, window))
        if source not in self.records:
            return
        earliest = min(source.users, key=self.order.__getitem__) is node
        norm = self.norms.get(source) if earliest else None
        other = self.gradients.pop(source, None)
        add = None if other is None else _channels_last(other, dy.dtype)
        dx, sums = convolution.input_gradient(dy, weight, window, x.shape, add, norm)
        if sums is not None:
            self.ready[source] = dx, sums
        else:
            self.gradients[source] = dx

    def _weight_gradient(self, x: Tensor, dy: Tensor, weight: Tensor, window: Window) -> Tensor:
        if self.side is None:
            return convolution.weight_gradient(x, dy, weight, window)
        self.side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.side):
            gradient = convolution.weight_gradient(x, dy, weight, window)
            self._beside.append((self.side.record_event(), (x, dy)))
        self._join(MOST_BESIDE)
        return gradient

    def _join(self, most: int) -> None:
        """Wait until no more than so many layers are computed beside; only then may the memory they read be reused."""
        while len(self._beside) > most:
            done, _ = self._beside.popleft()
            torch.cuda.current_stream(self.side.device).wait_event(done)  # type: ignore[union-attr]

    def _subsample(self, node: Node, x: Tensor) -> Tensor:
        source, stride, channels = node.args
        if self._needed(node):
            self.records[node] = lambda dy: self._add_gradient(
                source, convolution.subsample_gradient(_channels_last(dy), stride, x.shape)
            )
        return convolution.subsample(x, stride, channels)

    def _conv_norm(self, node: Node, x: Tensor, weight: Tensor, window: Window) -> Tensor:
        y, sums = convolution.forward(x, weight, window, self.weights[node.args[4].name])
        assert sums is not None
        result, gradient_of_norm = self._normalized(node, y, sums, node.args[2:])
        if self._needed(node):
            self.records[node] = lambda dy: self._conv_backward(node, gradient_of_norm(dy), x, weight, window)
        return result

    def _norm(self, node: Node, x: Tensor) -> Tensor:
        sums = batch_norm.moments(x, self.program.members)
        result, gradient_of_norm = self._normalized(node, x, sums, node.args[1:])
        if self._needed(node):
            self.records[node] = lambda dy: self._add_gradient(node.args[0], gradient_of_norm(dy))
        return result

    def _normalized(
        self, node: Node, x: Tensor, sums: BlockSums, arguments: tuple[Any, ...]
    ) -> tuple[Tensor, Callable[[Tensor | None], Tensor]]:
        """Normalise x; returns the result, and a function from its gradient to that of x."""
        names = [argument.name for argument in arguments[:4]]
        other = arguments[4] if len(arguments) > 4 else None
        weight, bias, mean, var = (self.weights[name] for name in names)
        norm = Norm(weight, bias, mean, var, node.kwargs["momentum"], node.kwargs["eps"])
        relu = node.kwargs["relu"]
        add = None if other is None else _channels_last(self.values[other], x.dtype)
        y, saved = batch_norm.normalize(x, sums, norm, add, relu)
        mask = (2 if other is not None else 1) if relu else 0
        if self._needed(node):
            self.norms[node] = NormBefore(x, y if mask == 2 else x, saved, norm.weight, norm.bias, mask)

        def backward(dy: Tensor | None) -> Tensor:
            self.norms.pop(node)
            if node in self.ready:
                masked, dy_sums = self.ready.pop(node)
            else:
                assert dy is not None
                masked, dy_sums = batch_norm.gradient_sums(
                    _channels_last(dy, x.dtype), x, y if mask == 2 else x, saved, norm, mask
                )
            if other is not None:
                self._add_gradient(other, masked)
            dx, parameters = batch_norm.input_gradient(masked, dy_sums, x, saved, norm)
            for name, gradient in zip(names[:2], parameters, strict=True):
                if name in self.learned:
                    self._add_weight_gradient(name, gradient)
            return dx

        return y, backward

    def _linear(self, node: Node) -> Tensor:
        """Linear layers of several members: the weights' gradients come in the layout and type of the parameters."""
        source, placeholder = node.args[0], node.args[1].name
        weight = self.weights[placeholder]
        bias = node.args[2] if len(node.args) > 2 else None
        x = self.values[source].to(weight.dtype)
        rows = x.reshape(len(weight), -1, x.shape[-1])
        shift = None if bias is None else self.weights[bias.name][:, None].to(weight.dtype)
        turned = weight.transpose(1, 2)
        y = torch.bmm(rows, turned) if shift is None else torch.baddbmm(shift, rows, turned)

        def backward(dy: Tensor) -> None:
            gradient = dy.to(weight.dtype).reshape(y.shape)
            if placeholder in self.learned:
                self._add_weight_gradient(placeholder, _product_in_float32(gradient.transpose(1, 2), rows))
            if bias is not None and bias.name in self.learned:
                self._add_weight_gradient(bias.name, gradient.sum(1, dtype=_wide(gradient.dtype)))
            if source in self.records:
                self._add_gradient(source, torch.bmm(gradient, weight).reshape(x.shape))

        if self._needed(node):
            self.records[node] = backward
        return y.reshape(*x.shape[:-1], weight.shape[1])

    # --- by autograd

    def _plain(self, node: Node) -> Any:
        leaves: dict[Node, Tensor] = {}

        def value(argument: Node) -> Any:
            if argument in leaves:
                return leaves[argument]
            is_weight = argument.op == "placeholder" and argument.name in self.weights
            known = self.weights[argument.name] if is_weight else self.values[argument]
            wanted = argument.name in self.learned if is_weight else argument in self.records
            if wanted and isinstance(known, Tensor):
                known = leaves[argument] = known.detach().requires_grad_()
            ours = not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem
            return known[0] if is_weight and not ours else known

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return self._item(node, args)
        if node.target is member_dropout:
            if self.generators is None:
                args, function = args[:1], _identity
            else:
                args, function = (args[0], self.generators, args[2]), member_dropout
        else:
            function = node.target
        with torch.enable_grad():
            result = function(*args, **kwargs)
        if leaves:
            outputs = result if isinstance(result, tuple | list) else (result,)
            if any(isinstance(output, Tensor) and output.requires_grad for output in outputs):
                self.records[node] = lambda dy: self._plain_backward(result, leaves, dy)
        if isinstance(result, tuple | list):
            return tuple(part.detach() if isinstance(part, Tensor) else part for part in result)
        return result.detach() if isinstance(result, Tensor) else result

    def _plain_backward(self, result: Any, leaves: Mapping[Node, Tensor], dy: Any) -> None:
        if isinstance(result, tuple | list):
            pairs = [(output, dy[number]) for number, output in enumerate(result) if dy.get(number) is not None]
        else:
            pairs = [(result, dy)]
        outputs, gradients = zip(*pairs, strict=True)
        gradients = tuple(own.to(output.dtype) for own, output in zip(gradients, outputs, strict=True))
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
        for argument, gradient in zip(leaves, found, strict=True):
            if gradient is None:
                continue
            if argument.op == "placeholder" and argument.name in self.weights:
                self._add_weight_gradient(argument.name, gradient)
            else:
                self._add_gradient(argument, gradient)

    def _item(self, node: Node, args: tuple[Any, ...]) -> Any:
        source, number = node.args
        item = args[0][number]
        if source in self.records and item.is_floating_point():  # indices have no gradient
            self.records[node] = lambda dy: self._add_item_gradient(source, number, dy)
        return item

    # --- gradients

    def _needed(self, node: Node) -> bool:
        """Tell whether anything behind a node learns."""
        return any(argument in self.records or argument.name in self.learned for argument in node.all_input_nodes)

    def _add_gradient(self, node: Node, gradient: Tensor) -> None:
        if node in self.records:
            before = self.gradients.get(node)
            self.gradients[node] = gradient if before is None else before + gradient

    def _add_item_gradient(self, node: fx.Node, number: int, gradient: Tensor) -> None:
        """Add a gradient of one of the tensors that a node returns."""
        items = self.gradients.setdefault(node, {})
        items[number] = items[number] + gradient if number in items else gradient

    def _add_weight_gradient(self, placeholder: str, gradient: Tensor) -> None:
        """Note the gradient of one use of a weight; `backward` sums them up."""
        self.weight_gradients.setdefault(placeholder, []).append(gradient)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product_in_float32(one: Tensor, other: Tensor) -> Tensor:
    """Multiply batches of matrices; of narrower types on a GPU, the product is float32 at once, where PyTorch can."""
    direct = getattr(torch.ops.aten.bmm, "dtype", None)
    if direct is not None and one.is_cuda and one.dtype == torch.bfloat16:
        return direct(one, other, torch.float32)
    return torch.bmm(one, other).to(_wide(one.dtype))


def _identity(x: Tensor) -> Tensor:
    return x.clone()


def _channels_last(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if x.dim() != 4:
        return x
    # The first copies once, if at all; the second what is stored in that order but with gaps.
    cast = x.to(x.dtype if dtype is None else dtype, memory_format=torch.channels_last)
    return cast.contiguous(memory_format=torch.channels_last)


def _last_uses(program: Program) -> dict[Node, list[Node]]:
    """For each node, the values that nobody reads after it."""
    last: dict[Node, Node] = {}
    for node in program.nodes:
        for argument in node.all_input_nodes:
            last[argument] = node
    uses: dict[Node, list[Node]] = {}
    for argument, node in last.items():
        uses.setdefault(node, []).append(argument)
    return uses

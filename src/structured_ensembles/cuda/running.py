"""Run a program forward and backward, on our kernels where they fit, else by PyTorch's autograd.

The backward pass is explicit: gradients of all values are on one tape, and nodes run in reverse order. So where the
last gradient of a value comes from a convolution, its kernel adds those of the other readers and computes the sums that
the batch norm before it needs (see convolution.py), without a kernel of its own for either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.cuda import batch_norm, convolution, output_scales, rank_one, subsampling
from structured_ensembles.cuda.batch_norm import Norm
from structured_ensembles.cuda.channels_last import stored_channels_last
from structured_ensembles.cuda.convolution import (
    BY_INPUT,
    BY_OUTPUT,
    NO_RELU,
    BlockSums,
    NormBefore,
    RunningNorm,
    Window,
)
from structured_ensembles.cuda.evaluated_node import EvaluatedNode, evaluate_node
from structured_ensembles.cuda.operations import (
    add_member_bias,
    conv_norm,
    member_conv,
    member_dropout,
    member_linear,
    member_norm,
    predict_conv,
    rank_one_weights,
    scaled_conv,
    subsample,
)
from structured_ensembles.cuda.program import Node, Program, ProgramError, last_uses
from structured_ensembles.cuda.tape import Gradients, Tape
from structured_ensembles.cuda.weight_gradient import weight_gradient


class Run:
    """One pass through a program.

    weights: stacked tensors (members, …) by placeholder. learned: the placeholders whose gradients are wanted.
    generators: of the members, for dropout; None: no dropout.
    side: a stream on which the gradients of convolutions' weights are computed, beside the rest of the backward pass.
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
        self.norms: dict[Node, NormBefore] = {}  # batch norms, by the node of their output
        self.tape = Tape(learned, side)
        self.order = {node: number for number, node in enumerate(program.nodes)}

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute the output; inputs: the tensors of the network's inputs, (members × samples, …)."""
        by_placeholder = dict(zip(self.program.inputs, inputs, strict=True))
        last_use = last_uses(self.program)
        result: Tensor | None = None
        for node in self.program.nodes:
            if node.op == "placeholder":
                self.values[node] = by_placeholder.get(node.name, self.program.constants.get(node.name))
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
        gradients = self.tape.run(self.program.nodes, self.program.output, gradient)
        self.norms.clear()  # of those that no gradient has reached
        return gradients

    def _run(self, node: Node) -> Any:
        """Compute the value of a node: on our kernels where they fit, else by autograd."""
        if node.target in (conv_norm, member_conv, predict_conv):
            result = self._convolved(node)
            if result is not None:
                return result
        if node.target is scaled_conv:
            result = self._scaled_conv(node)
            if result is not None:
                return result
        if node.target is member_norm:
            x = self.values[node.args[0]]
            if batch_norm.fits(x, self.program.members):
                return self._norm(node, x)
        if node.target is member_linear and len(self._value(node.args[1])) > 1:
            return self._linear(node)
        if node.target is rank_one_weights:
            return self._rank_one(node)
        if node.target is member_dropout and self.generators is not None:
            return self._dropout(node, self.generators)
        if node.target is subsample:
            x = stored_channels_last(self.values[node.args[0]])
            if batch_norm.fits(x, members=1):
                return self._subsample(node, x)
        return self._plain(node)

    # --- by our kernels

    def _convolved(self, node: Node) -> Tensor | None:
        """Compute a convolution, and what is fused with it, by our kernels; None where these do not fit."""
        if node.target is member_conv and node.args[2:] not in ((), (None,)):
            return None  # a bias, for which there is no kernel in training
        weight = self._value(node.args[1])
        x = stored_channels_last(self.values[node.args[0]], weight.dtype)
        window = Window(node.kwargs["stride"], node.kwargs["padding"])
        if node.target is predict_conv:
            can_predict = not self.learned and convolution.fits_prediction(x, weight, window)
            return self._predict_conv(node, x, window) if can_predict else None
        if not convolution.fits(x, weight, window):
            return None
        if node.target is member_conv:
            return self._conv(node, x, weight, window)
        several = convolution.rows_per_member(x, weight, window) > 1
        return self._conv_norm(node, x, weight, window) if several else None

    def _predict_conv(self, node: Node, x: Tensor, window: Window) -> Tensor:
        """Convolve, normalise by running statistics, add and apply the ReLU, in prediction: no gradients."""
        weight = self._value(node.args[1])
        bias, scale, shift, mean, variance = (
            None if argument is None else self.weights[argument.name] for argument in node.args[2:7]
        )
        norm = None
        if mean is not None:
            assert variance is not None
            scale = torch.ones_like(mean) if scale is None else scale
            shift = torch.zeros_like(mean) if shift is None else shift
            norm = RunningNorm(scale, shift, mean, variance, node.kwargs["eps"])
        add = stored_channels_last(self.values[node.args[7]], x.dtype) if len(node.args) > 7 else None
        relu, shared = node.kwargs["relu"], node.kwargs.get("shared", False)
        return convolution.predict(x, weight, window, bias, norm, add, relu=relu, shared=shared)

    def _conv(self, node: Node, x: Tensor, weight: Tensor, window: Window) -> Tensor:
        """Convolve, and record the backward pass."""
        y, _ = convolution.forward(x, weight, window)
        self.tape.record(
            node,
            lambda dy: self._conv_backward(node, stored_channels_last(dy, weight.dtype), x, weight, window),
        )
        return y

    def _conv_backward(self, node: Node, dy: Tensor, x: Tensor, weight: Tensor, window: Window) -> None:
        """Compute the gradients of a convolution's weights and inputs; dy: that of its output.

        If it is the first reader of a batch norm's output, all other gradients of that output have arrived: its kernel
        then goes on to the input of the norm's ReLU, and leaves the norm's sums.
        """
        source, weight_node = node.args[:2]
        if self.tape.is_needed(weight_node):
            self.tape.add_weight(weight_node, self.tape.side.run(weight_gradient, x, dy, weight, window))
        if source not in self.tape.records:
            return
        is_first_reader = min(source.users, key=self.order.__getitem__) is node
        alike = len(weight) == self.program.members  # not of members that are normalised together
        norm = self.norms.get(source) if is_first_reader and alike else None
        by_others = self.tape.gradients.pop(source, None)
        add = None if by_others is None else stored_channels_last(by_others, dy.dtype)
        dx, sums = convolution.input_gradient(dy, weight, window, x.shape, add, norm)
        if sums is not None:
            self.tape.ready[source] = dx, sums
        else:
            self.tape.gradients[source] = dx

    def _scaled_conv(self, node: Node) -> Tensor | None:
        """Convolve with each member's scaled weights, and record the backward pass; None where no kernel fits."""
        source, weight_node, bias_node, factors_node = node.args
        weight, factors = self._value(weight_node), self._value(factors_node)
        x = stored_channels_last(self.values[source], weight.dtype)
        scaled = output_scales.scale_weights(weight[0], factors)
        window = Window(**node.kwargs)
        if not convolution.fits(x, scaled, window):
            return None
        y, _ = convolution.forward(x, scaled, window)
        bias = None if bias_node is None else self._value(bias_node)
        if bias is not None:
            y = add_member_bias(y, (factors * bias)[None])

        def backward(dy: Tensor) -> None:
            dy = stored_channels_last(dy, weight.dtype)
            if self.tape.is_needed(factors_node):
                shared = (weight[0], None if bias is None else bias[0])
                gradient = self.tape.side.run(output_scales.factor_gradient, x, dy, scaled, window, *shared)
                self.tape.add_learned(factors_node.name, gradient)
            self._conv_backward(node, dy, x, scaled, window)  # goes on to the input; the shared weights are frozen

        if self.tape.is_needed(weight_node) or (bias_node is not None and self.tape.is_needed(bias_node)):
            raise ProgramError("layers whose outputs are scaled must be frozen")
        self.tape.record(node, backward)
        return y

    def _subsample(self, node: Node, x: Tensor) -> Tensor:
        """Subsample, and record the backward pass."""
        source, stride, channels = node.args
        self.tape.record(
            node,
            lambda dy: self.tape.add(source, subsampling.subsample_gradient(stored_channels_last(dy), stride, x.shape)),
        )
        return subsampling.subsample(x, stride, channels)

    def _conv_norm(self, node: Node, x: Tensor, weight: Tensor, window: Window) -> Tensor:
        """Convolve and normalise, and record the backward pass."""
        y, sums = convolution.forward(x, weight, window, self.weights[node.args[4].name])
        assert sums is not None
        result, gradient_of_norm = self._normalized(node, y, sums, node.args[2:])
        self.tape.record(node, lambda dy: self._conv_backward(node, gradient_of_norm(dy), x, weight, window))
        return result

    def _norm(self, node: Node, x: Tensor) -> Tensor:
        """Normalise, and record the backward pass."""
        sums = batch_norm.moments(x, self.program.members)
        result, gradient_of_norm = self._normalized(node, x, sums, node.args[1:])
        self.tape.record(node, lambda dy: self.tape.add(node.args[0], gradient_of_norm(dy)))
        return result

    def _normalized(
        self, node: Node, x: Tensor, sums: BlockSums, arguments: tuple[Any, ...]
    ) -> tuple[Tensor, Callable[[Tensor | None], Tensor]]:
        """Normalise x; returns the result, and a function from its gradient to that of x."""
        names = [argument.name for argument in arguments[:4]]
        added = arguments[4] if len(arguments) > 4 else None
        weight, bias, mean, var = (self.weights[name] for name in names)
        norm = Norm(weight, bias, mean, var, node.kwargs["momentum"], node.kwargs["eps"])
        relu = node.kwargs["relu"]
        add = None if added is None else stored_channels_last(self.values[added], x.dtype)
        y, saved = batch_norm.normalize(x, sums, norm, add, relu)
        mask = (BY_INPUT if added is None else BY_OUTPUT) if relu else NO_RELU
        if self.tape.must_record(node):
            self.norms[node] = NormBefore(x, y if mask == BY_OUTPUT else x, saved, norm.weight, norm.bias, mask)

        def backward(dy: Tensor | None) -> Tensor:
            self.norms.pop(node)
            if node in self.tape.ready:
                masked, dy_sums = self.tape.ready.pop(node)
            else:
                assert dy is not None
                masked, dy_sums = batch_norm.gradient_sums(
                    stored_channels_last(dy, x.dtype), x, y if mask == BY_OUTPUT else x, saved, norm, mask
                )
            if added is not None:
                self.tape.add(added, masked)
            dx, parameters = batch_norm.input_gradient(masked, dy_sums, x, saved, norm)
            for name, gradient in zip(names[:2], parameters, strict=True):
                if name in self.learned:
                    self.tape.add_learned(name, gradient)
            return dx

        return y, backward

    def _linear(self, node: Node) -> Tensor:
        """Apply a linear layer of several members, and record the backward pass.

        The weights' gradients have the layout and type of the parameters, which autograd's do not.
        """
        source, weight_node = node.args[:2]
        weight = self._value(weight_node)
        bias = node.args[2] if len(node.args) > 2 else None
        x = self.values[source].to(weight.dtype)
        rows = x.reshape(len(weight), -1, x.shape[-1])
        shift = None if bias is None else self.weights[bias.name][:, None].to(weight.dtype)
        transposed = weight.transpose(1, 2)
        y = torch.bmm(rows, transposed) if shift is None else torch.baddbmm(shift, rows, transposed)

        def backward(dy: Tensor) -> None:
            gradient = dy.to(weight.dtype).reshape(y.shape)
            if self.tape.is_needed(weight_node):
                self.tape.add_weight(weight_node, _product_in_float32(gradient.transpose(1, 2), rows))
            if bias is not None and bias.name in self.learned:
                self.tape.add_learned(bias.name, gradient.sum(1, dtype=_wide(gradient.dtype)))
            if source in self.tape.records:
                self.tape.add(source, torch.bmm(gradient, weight).reshape(x.shape))

        self.tape.record(node, backward)
        return y.reshape(*x.shape[:-1], weight.shape[1])

    def _rank_one(self, node: Node) -> Tensor:
        """Compute the weights of members that share one but for rank-one factors, and record the backward pass."""
        placeholders = [argument.name for argument in node.args]
        tensors = [self.weights[name][0] for name in placeholders]

        def backward(gradient: Tensor) -> None:
            self.tape.side.join()  # it may have been computed on the side stream
            gradients = rank_one.factor_gradients(gradient, *tensors)
            for placeholder, of_argument in zip(placeholders, gradients, strict=True):
                if placeholder in self.learned:
                    self.tape.add_learned(placeholder, of_argument[None])

        self.tape.record(node, backward)
        return rank_one.member_weights(*tensors)

    def _dropout(self, node: Node, generators: Sequence[torch.Generator | None]) -> Tensor:
        """Drop elements as `member_dropout` does, and record the backward pass: a kernel each, and a mask of bytes."""
        source, _, rate = node.args
        x = self.values[source]
        mask = torch.empty_like(x, dtype=torch.bool)
        for member_mask, generator in zip(mask.chunk(len(generators)), generators, strict=True):
            member_mask.bernoulli_(1 - rate, generator=generator)
        scale = 1 / (1 - rate) if rate < 1 else 0.0
        scaled = partial(torch.ops.aten.native_dropout_backward.default, mask=mask, scale=scale)  # x · mask · scale
        if source in self.tape.records:
            self.tape.records[node] = lambda dy: self.tape.add(source, scaled(dy))
        return scaled(x)

    # --- by autograd

    def _plain(self, node: Node) -> Any:
        """Compute a node by PyTorch, and record the backward pass."""
        if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), tuple):
            return self._item(node)
        evaluated = evaluate_node(node, self._value, self._is_weight, self.tape.is_needed)
        if evaluated.has_gradients:
            self.tape.records[node] = lambda dy: self._plain_backward(evaluated, dy)
        return evaluated.detached

    def _plain_backward(self, evaluated: EvaluatedNode, dy: Any) -> None:
        """Add the gradients of a node's arguments. dy: of its result; where that is a tuple, a dict by index."""
        for argument, gradient in evaluated.gradients(dy):
            if self._is_weight(argument):
                self.tape.add_learned(argument.name, gradient)
            else:
                self.tape.add(argument, gradient)

    def _item(self, node: Node) -> Any:
        """Return one of the tensors that a node returns, and record the backward pass."""
        source, number = node.args
        item = self.values[source][number]
        if source in self.tape.records and item.is_floating_point():  # indices have no gradient
            self.tape.records[node] = lambda dy: self.tape.add_item(source, number, dy)
        return item

    # --- arguments

    def _value(self, node: Node) -> Any:
        """Return the value of a node, or a weight (members, …)."""
        return self.weights[node.name] if self._is_weight(node) else self.values[node]

    def _is_weight(self, node: Node) -> bool:
        """Tell whether a node stands for a stacked weight or buffer."""
        return node.op == "placeholder" and node.name in self.weights


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for narrower types, the type itself for wider ones."""
    return torch.promote_types(dtype, torch.float32)


def _product_in_float32(one: Tensor, other: Tensor) -> Tensor:
    """Multiply batches of matrices; of narrower types on a GPU, the product is float32 at once, where PyTorch can."""
    direct = getattr(torch.ops.aten.bmm, "dtype", None)
    if direct is not None and one.is_cuda and one.dtype == torch.bfloat16:
        return direct(one, other, torch.float32)
    return torch.bmm(one, other).to(_wide(one.dtype))

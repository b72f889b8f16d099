"""Walk: follows an exported graph, operation by operation, and collects what it says about channels."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from structured_ensembles.networks.resizing import is_matrix_layer
from structured_ensembles.tracing.follow import follow
from structured_ensembles.tracing.layout import Layout, Value, channel_sets, extent, fix, fixed_layout, new_layout
from structured_ensembles.tracing.nodes import (
    declared_results,
    extra_operation,
    feeds_layer_inside,
    has_data_dependent_shape,
    is_list,
    is_normalized,
    largest,
    live_nodes,
    module_of,
    norm_after,
    operation_name,
    reads_only_shape,
    shapes_of,
    small_constant,
)
from structured_ensembles.tracing.rules import Call, Result, fix_unknown

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
Results = dict[fx.Node, Result | int]  # of nodes; numbers are sizes that depend on data
SCALED_LAYERS = (*LAYERS, nn.Embedding, nn.RNNBase)  # whose output scaling vectors can multiply, by a hook


@dataclass
class Producer:
    """A layer that computes channels.

    module: its name; where code outside a layer computes with a bare parameter, that of the parameter.
    channels: the layout of its output dimension. norm: the norm layer that reads its output, if nothing else does.
    weight, weight_dim: the parameter that it computes them with, and the dimension of it that has a row per channel;
        None where the weight is computed, as under `weight_norm`: such channels are fixed.
    scaled: whether scaling vectors can multiply its output.
    normalized: whether its output passes a norm layer before the next layer or the network's output.
    """

    module: str
    channels: Layout
    dim: int  # of the channels in the output, from the end: the batch dimension may be missing
    norm: str | None
    normalized: bool
    weight: str | None
    weight_dim: int
    scaled: bool


@dataclass
class Step:
    """One operation: its name, results and arguments, and those that are expected to change.

    sizes, replacement: how the operation is rewritten in a graph that is cut, see `Call`.
    """

    name: str
    module: str
    arguments: dict[str, Any]
    results: list[Value | None]
    expected: dict[str, Any]
    values: list[Value]
    sizes: dict[str, Any] = field(default_factory=dict)
    replacement: Any = None
    node: fx.Node | None = None


@dataclass
class Walk:
    """State of following one or more graphs of a model."""

    model: nn.Module
    parameters: dict[str, Value] = field(default_factory=dict)
    producers: list[Producer] = field(default_factory=list)
    consumers: list[tuple[str, Layout]] = field(default_factory=list)
    products: list[tuple[str, Layout]] = field(default_factory=list)  # modules that sum over products of activations
    attributes: dict[tuple[str, str], Layout] = field(default_factory=dict)  # of layers, whose values are sizes
    used: set[str] = field(default_factory=set)
    parameter_of: dict[str, str] = field(default_factory=dict)  # names of parameters, by placeholder
    output_shape: tuple[int, ...] | None = None
    batch: Layout | None = None  # the samples of a batch, the first dimension of every input

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules(remove_duplicate=False))  # a module may have several names
        names: dict[int, list[str]] = {}
        tensors = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            names.setdefault(id(tensor), []).append(name)
            first = names[id(tensor)][0]
            if first == name:
                dims = tuple(new_layout(size) if size > 1 else fixed_layout(size) for size in tensor.shape)
                self.parameters[name] = Value(tuple(tensor.shape), dims, parameter=name)
            else:
                self.parameters[name] = self.parameters[first]
                if not self.same_module(name.rpartition(".")[0], first.rpartition(".")[0]):
                    _fix_all(self.parameters[first], f"{first} is also {name}: shared weights")

    def same_module(self, one: str, other: str) -> bool:
        """Tell whether two names belong to one module."""
        return one == other or (one in self.modules and self.modules[one] is self.modules.get(other))

    def follow(self, program: ExportedProgram) -> list[Step]:
        """Follow one graph; return its operations in order."""
        self.batch = None
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        results: Results = {}
        steps: list[Step] = []
        needed = live_nodes(program.graph)
        for node in program.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                spec = specs[node.name]
                if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    results[node] = self._parameter(node, spec.target)
                elif spec.kind == InputKind.USER_INPUT:
                    results[node] = self._input(node)
                else:
                    value = _fixed_value(node, "meets a constant tensor")
                    constant = small_constant(program.constants.get(str(spec.target)))
                    steps.append(Step("constant", module_of(node), {"value": constant}, [value], {}, []))
                    results[node] = value
            elif node.op == "output":
                self._finish(_with_results(node.args, results))
            elif node.target is operator.getitem:
                source, index = node.args
                items = results[source]  # type: ignore[index]
                results[node] = items[index] if isinstance(items, list) else None  # type: ignore[index]
            elif node.op == "call_function":
                results[node] = self._operation(node, results, steps)
                if isinstance(node.meta.get("val"), torch.SymInt):  # computed from a size that depends on data
                    results[node] = largest(node.meta["val"])
            else:
                results[node] = fix_unknown(_call(node, results, self), f"{node.op} {node.target} is not understood")
        return steps

    def _input(self, node: fx.Node) -> Value | None:
        """Return the value of an input of the network; None if it is no tensor."""
        value = _fixed_value(node, "the network's input")
        if value is not None and value.shape:
            value.dims = (self._batch_of(value.shape[0]), *value.dims[1:])
        return value

    def _batch_of(self, size: int) -> Layout:
        """Return the layout of the first dimension of an input; inputs of equally many rows share it."""
        self.batch = self.batch or new_layout(size, fixed="the samples of a batch", batch=True)
        return self.batch if extent(self.batch) == size else fixed_layout(size, "the network's input")

    def _parameter(self, node: fx.Node, name: str) -> Value:
        """Return a parameter's value, fixed if several operations use it."""
        value = self.parameters[name]
        self.parameter_of[node.name] = name
        if node.users:
            self.used.add(name)
        uses = [user for user in node.users if not reads_only_shape(user, node)]
        owner = self.modules.get(name.rpartition(".")[0])
        # What a layer computes twice could be scaled only once; other parameters and buffers may be used anywhere.
        if len(uses) > 1 and isinstance(owner, (*SCALED_LAYERS, nn.modules.batchnorm._NormBase)):
            _fix_all(value, f"{name} is used {len(uses)} times: shared weights")
        return value

    def _operation(self, node: fx.Node, results: Results, steps: list[Step]) -> Result:
        """Apply the rule for an operation and append it to the steps."""
        call = _call(node, results, _Layers(self, node))
        if not any(shape is not None for shape in call.shapes) and not declared_results(node):
            return None  # an assertion
        result = follow(call)
        if isinstance(result, list) and len(declared_results(node)) == 1 and not is_list(node):
            result = result[0]
        listed = result if isinstance(result, list) else [result]
        steps.append(
            Step(
                call.name,
                module_of(node),
                call.arguments,
                listed,
                call.expected,
                call.values,
                call.sizes,
                call.replacement,
                node,
            )
        )
        return result

    def _finish(self, outputs: Any) -> None:
        """Fix the channels of the network's outputs."""
        values: list[Value] = []
        torch.utils._pytree.tree_map_only(Value, values.append, outputs)
        computed = [value for value in values if value.parameter is None]  # not the updated statistics
        for value in computed:
            _fix_all(value, "reaches the network's output")
        if computed and self.output_shape is None:
            self.output_shape = computed[0].shape


@dataclass
class _Layers:
    """Receiver of what the rule for one node reports about layers."""

    walk: Walk
    node: fx.Node

    def produce(self, weight: Value, channels: Layout, dim: int = 0, bare: bool = False) -> None:
        """Record the layer of `weight` as a producer of the channels; fix them if there is no such layer.

        dim: the dimension of the weight that has a row per channel. bare: whether a parameter will do without a layer,
        as in `nn.MultiheadAttention`; no scaling vector can multiply what it computes.
        """
        owner = self._owner(weight)
        parameter = weight.parameter or (f"{owner}.weight" if owner is not None else None)
        if parameter is None or (owner is None and not bare):
            self._fix_output(channels, dim, parameter)
            return
        number = len(self.walk.producers)
        norm = norm_after(self.node)
        if norm is not None and not isinstance(self.walk.model.get_submodule(norm), nn.modules.batchnorm._BatchNorm):
            norm = None
        # Scaling vectors multiply what a layer returns: of a layer with further ones inside, that is something else.
        scaled = owner is not None and not feeds_layer_inside(self.node)
        output_dim = -1
        layer = None if owner is None else self.walk.model.get_submodule(owner)
        if isinstance(layer, (*LAYERS, nn.Embedding)):
            operation = extra_operation(self.node)
            if operation is not None:  # scaling vectors act on the output of the layer
                fix(channels, f"{owner} does more than its kind of layer: {operation}")
            if isinstance(layer, nn.modules.conv._ConvNd):
                output_dim = 1 - len(weight.shape)
        self.walk.producers.append(
            Producer(
                module=owner or parameter,
                channels=channels,
                dim=output_dim,
                norm=norm,
                normalized=is_normalized(self.node),
                weight=parameter,
                weight_dim=dim,
                scaled=scaled,
            )
        )
        for channel_set in channel_sets(channels):
            channel_set.computed = True
            if scaled:  # the groups of a grouped convolution are scaled where they are computed first
                channel_set.heads = channel_set.heads or frozenset({number})

    def _fix_output(self, channels: Layout, dim: int, parameter: str | None) -> None:
        """Fix channels that no parameter of a layer computes; list a layer whose weight is computed as their source."""
        module = module_of(self.node)
        if parameter is not None or not isinstance(self.walk.modules.get(module), LAYERS):
            fix(channels, f"computed from {parameter or 'a computed weight'} by code outside a layer")
            return
        fix(channels, f"the weight of {module} is computed, not a parameter")
        self.walk.producers.append(Producer(module, channels, -1, None, True, None, dim, scaled=False))

    def consume(self, weight: Value, channels: Layout) -> None:
        """Record the layer of `weight` as a reader of the channels."""
        name = self._owner(weight) or weight.parameter or "a computed weight"
        self.walk.consumers.append((name, channels))

    def is_derived(self, weight: Value) -> bool:
        """Tell whether a layer computes this weight from its own parameter `weight` and nothing but parameters."""
        module = self.walk.modules.get(module_of(self.node))
        if weight.parameter is not None or not isinstance(module, LAYERS) or "weight" not in module._parameters:
            return False
        sources, remaining = set(), list(self.node.all_input_nodes[1:2])
        while remaining:
            node = remaining.pop()
            if node.op == "placeholder":
                sources.add(self.walk.parameter_of.get(node.name))
            remaining += node.all_input_nodes
        return f"{module_of(self.node)}.weight" in sources and None not in sources

    def multiply(self, channels: Layout) -> None:
        """Record that the module sums over products of two activations with these channels."""
        self.walk.products.append((module_of(self.node), channels))

    def attribute(self, name: str, size: Layout) -> None:
        """Record that the module keeps a size as an attribute of this name, if it has such an attribute."""
        module = module_of(self.node)
        if getattr(self.walk.model.get_submodule(module), name, None) == extent(size):
            self.walk.attributes[module, name] = size

    def _owner(self, weight: Value) -> str | None:
        """Return the name of the layer of this weight, if the operation is in that layer's forward.

        A layer may compute the weight that it uses from its parameter, as standardised convolutions do.
        """
        if weight.parameter is None:
            module = module_of(self.node)
            return module if self.is_derived(weight) else None
        owner = weight.parameter.rpartition(".")[0]
        is_layer = _is_scaled(self.walk.model.get_submodule(owner))
        return owner if is_layer and self.walk.same_module(module_of(self.node), owner) else None


def _is_scaled(module: nn.Module) -> bool:
    """Tell whether scaling vectors can multiply the output of a layer: ours to know, and Hugging Face's `Conv1D`."""
    return isinstance(module, SCALED_LAYERS) or is_matrix_layer(module)


def _call(node: fx.Node, results: Results, layers: Any) -> Call:
    """Make the call of a node, with arguments by the names of its schema."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None:
        arguments = {str(index): _with_results(argument, results) for index, argument in enumerate(node.args)}
        return Call(str(target), arguments, shapes_of(node), layers, target)
    arguments = {}
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args):
            arguments[argument.name] = _with_results(node.args[index], results)
        elif argument.name in node.kwargs:
            arguments[argument.name] = _with_results(node.kwargs[argument.name], results)
        else:
            arguments[argument.name] = argument.default_value
    shapes, data_dependent = shapes_of(node), has_data_dependent_shape(node)
    return Call(operation_name(node), arguments, shapes, layers, target, data_dependent=data_dependent)


def _with_results(argument: Any, results: Results) -> Any:
    """Return an argument of a node with every node in it replaced by its result."""
    return fx.node.map_arg(argument, results.__getitem__)  # type: ignore[arg-type, return-value]


def _fixed_value(node: fx.Node, reason: str) -> Value | None:
    """Return a tensor of which no channel can be removed; None for a node that is no tensor."""
    shape = shapes_of(node)[0]
    return None if shape is None else Value(shape, tuple(fixed_layout(size, reason) for size in shape))


def _fix_all(value: Value, reason: str) -> None:
    """Fix the channels of all dimensions."""
    for dim in value.dims:
        fix(dim, reason)

"""A network that runs a graph of operations instead of Python code, with the modules, weights and names of the code.

Some code relies on the sizes of its layers: a hard-coded view, the number of heads. Such a network can still be cut: in
its exported graph those sizes are constants, which are rewritten. The result is an ordinary module: it trains, moves
between devices, has a state dict with the names of the code's, and can be exported. Its submodules hold the weights but
are not called, so that hooks on them do not run; one flag, `network.training`, chooses between the two graphs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from structured_ensembles.networks.copying import dtype_of


class Reference(NamedTuple):
    """An argument that is the value of this number: a weight, an input, or the result of an operation."""

    number: int


class Samples(NamedTuple):
    """An argument that is a size in proportion to the batch: so many for each sample."""

    per_sample: int


class OfNetwork(NamedTuple):
    """An argument that depends on where the network runs: its "device" and "dtype", and whether "cudnn" is on."""

    attribute: str


@dataclass(frozen=True)
class Operation:
    """One operation: its name, such as "aten::linear.default", and its arguments.

    last_uses: the numbers of the values that no later operation uses.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    last_uses: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A network's pass in one mode. Values are numbered: weights first, then constants, inputs and results.

    weights: names of parameters and buffers. inputs: names of the arguments of forward, in their order.
    settings: the values of those that are no tensors, with which the network was traced.
    outputs: what forward returns, with references in place of tensors.
    """

    weights: tuple[str, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    outputs: Any
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        """Return the graph itself: it is never changed."""
        return self

    def run(
        self, network: nn.Module, inputs: list[Tensor], observe: Callable[[int, Any], None] = lambda number, value: None
    ) -> Any:
        """Run the operations with the weights of `network`; `observe` gets each operation's number and its result."""
        samples = next((tensor.shape[0] for tensor in inputs if tensor.dim()), 1)
        device = inputs[0].device if inputs else torch.device("cpu")
        now = {"device": device, "dtype": dtype_of(network), "cudnn": torch.backends.cudnn.enabled}
        tensors: list[Any] = [_tensor_of(network, name) for name in self.weights]
        values = [*tensors, *(constant.to(device) for constant in self.constants), *inputs]

        def fill(nested: Any) -> Any:
            kind = type(nested)
            if kind is Reference:
                return values[nested.number]
            if kind is Samples:
                return nested.per_sample * samples
            if kind is OfNetwork:
                return now[nested.attribute]
            return [fill(item) for item in nested] if kind is list else nested

        for number, operation in enumerate(self.operations):
            function = find_operation(operation.name)
            keywords = {name: fill(value) for name, value in operation.keywords.items()}
            result = function(*map(fill, operation.arguments), **keywords)
            observe(number, result)
            values.append(result)
            for last in operation.last_uses:
                values[last] = None  # activations that nobody needs any more
        return tree_map(fill, self.outputs, is_leaf=lambda leaf: isinstance(leaf, Reference))


class GraphNetwork(nn.Module):
    """A network that runs the graph of its mode. See the file's docstring.

    source: the network whose modules and weights it takes over. record: how it was cut, for a file to rebuild it.
    """

    def __init__(self, source: nn.Module, evaluation: Graph, training: Graph, record: Mapping[str, Any]) -> None:
        super().__init__()
        for name, module in source._modules.items():
            self.add_module(name, module)
        for name, parameter in source._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in source._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in source._non_persistent_buffers_set)
        self.graphs = {False: evaluation, True: training}
        self.record = dict(record)
        self.train(source.training)

    def forward(self, *positional: Any, **keywords: Any) -> Any:
        """Run the graph of the current mode on the arguments that the network's code takes."""
        graph = self.graphs[self.training]
        return graph.run(self, bind_inputs(graph, positional, keywords))

    def extra_repr(self) -> str:
        """Say how many operations the graph has."""
        return f"graph of {len(self.graphs[False].operations)} operations"


def bind_inputs(graph: Graph, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Tensor]:
    """Return the input tensors in the order of their names; raise a TypeError if the network was traced with others.

    An argument that is no tensor, such as a flag, is part of the graph: it must have the value of the example.
    """
    by_position = tree_leaves(positional)
    passed = dict(zip(graph.inputs, by_position, strict=False))
    by_keyword = {_joined(name, path): leaf for name, value in keywords.items() for path, leaf in _leaves(value)}
    tensors = {name: value for name, value in (passed | by_keyword).items() if isinstance(value, Tensor)}
    names = [name for name in graph.inputs if name not in graph.settings]
    if len(by_position) > len(graph.inputs) or passed.keys() & by_keyword.keys() or set(names) != set(tensors):
        count = sum(isinstance(leaf, Tensor) for leaf in by_position)
        told = [f"{count} by position"] * bool(count)
        told += sorted(name for name, value in by_keyword.items() if isinstance(value, Tensor))
        raise TypeError(
            f"the network was traced with the inputs {', '.join(names)}, but got {', '.join(told) or 'none'}"
        )
    for name, value in (passed | by_keyword).items():
        if not isinstance(value, Tensor) and value != graph.settings.get(name):
            traced = repr(graph.settings[name]) if name in graph.settings else "no such argument"
            raise TypeError(f"the network was traced with {traced} for {name}, and cannot be run with {value!r}")
    return [tensors[name] for name in names]


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    """List the tensors and other values in an argument, each with the path to it."""
    return tree_flatten_with_path(value)[0]


def _joined(name: str, path: Any) -> str:
    """Name a value inside of an argument as `torch.export` does: `images_0`, `batch_tokens`."""
    return "_".join([name, *re.findall(r"\w+", keystr(path))])


def _tensor_of(network: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer by its qualified name."""
    owner, _, attribute = name.rpartition(".")
    module = network.get_submodule(owner)
    return module._parameters[attribute] if attribute in module._parameters else module._buffers[attribute]


@cache
def find_operation(name: str) -> Callable[..., Any]:
    """Return an operation by its name: one of PyTorch's own, or of Python's operators."""
    namespace, _, rest = name.partition("::")
    if namespace == "operator":
        return getattr(operator, rest)
    operation, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), operation), overload)


def name_operation(target: Any) -> str:
    """Name an operation of an exported graph; raise a ValueError if it is no operation that has a name."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}::{target._opname}.{target._overloadname}"
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return f"operator::{name}"
    raise ValueError(f"{target} is no operation of PyTorch's")


def references(nested: Any) -> list[int]:
    """List the numbers of the values in nested lists of arguments."""
    if isinstance(nested, Reference):
        return [nested.number]
    if isinstance(nested, list | tuple) and not isinstance(nested, Samples | OfNetwork):
        return [number for item in nested for number in references(item)]
    return []

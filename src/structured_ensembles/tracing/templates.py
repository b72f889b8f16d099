"""Templates: exported graphs whose sizes follow the channels, for networks whose own code cannot be cut.

A template is the graph of the full network with a `Size` in place of every number that counts channels. All other
constants stay those of the full network, so that the cut graph computes what the full one computes without the dropped
channels. Before a group is offered, a cut template is run on fake tensors, and every shape compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_unflatten

from structured_ensembles.common.errors import first_line
from structured_ensembles.networks.graph_network import (
    Graph,
    OfNetwork,
    Operation,
    Reference,
    Samples,
    name_operation,
    references,
)
from structured_ensembles.networks.resizing import Axis, kept_size
from structured_ensembles.tracing.layout import NO_CHANNELS, ChannelSet, Layout, Run, extent, resolve
from structured_ensembles.tracing.nodes import has_data_dependent_shape, live_nodes
from structured_ensembles.tracing.walk import Step

AxisOf = Callable[[Layout], Axis]


class TemplateError(Exception):
    """A graph cannot be cut; the message says why. step: the operation to blame, if one is."""

    def __init__(self, reason: str, step: Step | None = None) -> None:
        super().__init__(reason)
        self.step = step


class Size(NamedTuple):
    """A number in a template: the positions along an axis that are left, for each sample if it counts samples too."""

    axis: Axis
    per_sample: bool


@dataclass(frozen=True)
class Template:
    """A graph of the full network with sizes in place of numbers."""

    graph: Graph

    def cut(self, counts: Mapping[str, int]) -> Graph:
        """Return the graph when `counts[group]` channels of each group are left."""
        operations = tuple(
            replace(
                operation,
                arguments=tuple(_with_numbers(value, counts) for value in operation.arguments),
                keywords={name: _with_numbers(value, counts) for name, value in operation.keywords.items()},
            )
            for operation in self.graph.operations
        )
        return replace(self.graph, operations=operations)


def make_template(
    program: ExportedProgram, steps: Sequence[Step], axis_of: AxisOf, dtype: torch.dtype
) -> tuple[Template, list[Step | None]]:
    """Make the template of an exported network; return it and the step of each operation. Raises `TemplateError`.

    axis_of: returns the groups along a layout. dtype: that of the network.
    """
    by_node = {step.node: step for step in steps}
    signature = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    live = live_nodes(program.graph)
    nodes = [node for node in program.graph.nodes if node in live and node.target not in _ASSERTIONS]
    if any(map(has_data_dependent_shape, nodes)):
        raise TemplateError("its graph has sizes that depend on data")
    placeholders = [(node, signature[node.name].kind) for node in nodes if node.op == "placeholder"]
    weights = [node for node, kind in placeholders if kind in (InputKind.PARAMETER, InputKind.BUFFER)]
    inputs = [node for node, kind in placeholders if kind == InputKind.USER_INPUT]
    constants = [node for node, _ in placeholders if node not in weights and node not in inputs]
    tensors = [program.constants.get(str(signature[node.name].target)) for node in constants]
    if any(not isinstance(tensor, Tensor) or type(tensor) is not Tensor for tensor in tensors):
        raise TemplateError("its graph has constant tensors")
    settings = {node.name: node.meta.get("val") for node in inputs if not isinstance(node.meta.get("val"), Tensor)}
    tensor_inputs = [node for node in inputs if node.name not in settings]
    numbers: dict[fx.Node, int] = {node: number for number, node in enumerate((*weights, *constants, *tensor_inputs))}
    operations, operation_steps = [], []
    for node in (node for node in nodes if node.op == "call_function"):
        operations.append(_operation(node, by_node.get(node), numbers, axis_of, dtype))
        operation_steps.append(by_node.get(node))
        numbers[node] = len(numbers)
    output = next(node for node in nodes if node.op == "output")
    outputs = [Reference(numbers[leaf]) if isinstance(leaf, fx.Node) else leaf for leaf in output.args[0]]
    structure = program.call_spec.out_spec
    if structure is None or structure.num_leaves != len(outputs):
        raise TemplateError("its graph has other outputs than the network")
    graph = Graph(
        weights=tuple(str(signature[node.name].target) for node in weights),
        constants=tuple(tensor for tensor in tensors if isinstance(tensor, Tensor)),
        inputs=tuple(node.name for node in inputs),
        operations=_with_last_uses(operations, len(weights) + len(constants) + len(tensor_inputs), outputs),
        outputs=tree_unflatten(outputs, structure),
        settings=settings,
    )
    return Template(graph), operation_steps


_ASSERTIONS = (torch.ops.aten._assert_tensor_metadata.default,)
# A trace drops a `contiguous()` that copies nothing, but other devices and inputs store results in another order.
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _with_sizes(node: fx.Node, step: Step | None, axis_of: AxisOf) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the target and the arguments of a node, with the sizes that its step knows."""
    target: Any = node.target
    arguments, keywords = list(node.args), dict(node.kwargs)
    if step is not None and step.sizes:
        changed = {name: _sizes(value, axis_of) for name, value in step.sizes.items()}
        if step.replacement is not None:
            target = step.replacement
            arguments = [node.args[0]]
            keywords = {}
        positions = [argument.name for argument in target._schema.arguments]
        if step.replacement is not None and "dim" in positions:
            keywords["dim"] = step.arguments.get("dim", 0)
        for name, value in changed.items():
            if name not in positions:  # such as the size of an expand_as, which another tensor gives
                continue
            index = positions.index(name)
            if index < len(arguments) and not target._schema.arguments[index].kwarg_only:
                arguments[index] = value
            else:
                keywords[name] = value
    if target in _VIEWS:
        shape = keywords.pop("size", None)
        return torch.ops.aten.reshape.default, arguments if shape is None else [*arguments, shape], keywords
    return target, arguments, keywords


def _operation(
    node: fx.Node, step: Step | None, numbers: Mapping[fx.Node, int], axis_of: AxisOf, dtype: torch.dtype
) -> Operation:
    """Write one node as an operation, with the sizes that its step knows."""
    target, arguments, keywords = _with_sizes(node, step, axis_of)
    try:
        name = name_operation(target)
    except ValueError as error:
        raise TemplateError(str(error), step) from error

    def written(nested: Any) -> Any:
        if isinstance(nested, fx.Node):
            return Reference(numbers[nested])
        is_list = isinstance(nested, list | tuple) and not isinstance(nested, Size | OfNetwork)
        return [written(item) for item in nested] if is_list else nested

    if keywords.get("device") is not None and not any(isinstance(leaf, fx.Node) for leaf in node.args):
        keywords["device"] = OfNetwork("device")
        if keywords.get("dtype") is dtype:
            keywords["dtype"] = OfNetwork("dtype")
    schema = getattr(target, "_schema", None)
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name in ("cudnn_enabled", "cudnn_enable") and index < len(arguments):
            arguments[index] = OfNetwork("cudnn")
    return Operation(name, tuple(map(written, arguments)), {key: written(value) for key, value in keywords.items()})


def _is_layout(value: Any) -> bool:
    """Tell whether an argument is a layout."""
    return isinstance(value, tuple) and all(isinstance(run, Run) for run in value)


def _sizes(value: Any, axis_of: AxisOf) -> Any:
    """Replace the layouts in an argument by sizes, or by numbers where nothing can change."""
    if isinstance(value, list):
        return [_sizes(item, axis_of) for item in value]
    if not _is_layout(value):
        return value
    runs = resolve(value)
    samples = [run for run in runs if any(factor.batch for factor in run.factors)]
    if not samples:
        axis = axis_of(value)
        return Size(axis, False) if any(span.group is not None for span in axis) else extent(value)
    if len(samples) < len(runs):
        raise TemplateError("a dimension of its graph holds samples and something else")
    per_sample = [tuple(factor for factor in run.factors if not factor.batch) for run in runs]
    return Size(axis_of(tuple(Run(factors or (ChannelSet(1, NO_CHANNELS),)) for factors in per_sample)), True)


def _with_numbers(nested: Any, counts: Mapping[str, int]) -> Any:
    """Replace the sizes in nested lists of arguments by numbers."""
    if isinstance(nested, Size):
        size = kept_size(nested.axis, counts)
        return Samples(size) if nested.per_sample else size
    return [_with_numbers(item, counts) for item in nested] if type(nested) is list else nested


def _with_last_uses(operations: list[Operation], first: int, outputs: Sequence[Any]) -> tuple[Operation, ...]:
    """Note at every operation which results nobody needs after it."""
    last: dict[int, int] = {}
    for index, operation in enumerate(operations):
        last[first + index] = index
        last |= dict.fromkeys(references((*operation.arguments, *operation.keywords.values())), index)
    kept = set(references(outputs))
    uses: dict[int, list[int]] = {}
    for number, index in last.items():
        if number >= first and number not in kept:
            uses.setdefault(index, []).append(number)
    return tuple(replace(operation, last_uses=tuple(uses.get(i, ()))) for i, operation in enumerate(operations))


def check_other_samples(program: ExportedProgram, other: ExportedProgram, steps: Sequence[Step], samples: int) -> None:
    """Compare a graph with that of more samples; raise `TemplateError` where a number that is no size follows them.

    A size that follows them, though nothing has met the samples in its dimension, becomes their number: code may index
    what it has expanded with positions that it counts. samples: how many the first graph was made with.
    """
    by_node = {step.node: step for step in steps}
    nodes, others = (
        [node for node in graph.nodes if node.op == "call_function"] for graph in (program.graph, other.graph)
    )
    if [node.target for node in nodes] != [node.target for node in others]:
        raise TemplateError("its code does something else with another number of samples")
    for node, other_node in zip(nodes, others, strict=True):
        step = by_node.get(node)
        if step is None:
            continue
        if _constants(node, step) != _constants(other_node, step) or not _sizes_follow(node, other_node, step, samples):
            raise TemplateError(f"{step.name} depends on the number of samples", step)


def _constants(node: fx.Node, step: Step) -> str:
    """Write out the arguments of a node that are neither tensors nor sizes which a template rewrites."""
    named = _named_arguments(node)
    constants = {name: value for name, value in named.items() if name not in step.sizes and step.replacement is None}
    return str(fx.node.map_arg(constants, lambda _: None))


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by the names of its schema."""
    names = [argument.name for argument in getattr(getattr(node.target, "_schema", None), "arguments", ())]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _sizes_follow(node: fx.Node, other: fx.Node, step: Step, samples: int) -> bool:
    """Tell whether the layouts say which sizes of a node follow the samples; note those of a dimension of its own."""
    named, other_named = _named_arguments(node), _named_arguments(other)
    for name in step.sizes.keys() & named.keys() if step.replacement is None else ():
        lists = [value if isinstance(value, list) else [value] for value in (named[name], other_named[name])]
        layouts = step.sizes[name] if isinstance(step.sizes[name], list) else [step.sizes[name]]
        for layout, size, other_size in zip(layouts, *lists, strict=False):
            if size == other_size or not _is_layout(layout):
                continue
            factors = [factor for run in resolve(layout) for factor in run.factors]
            if any(factor.batch for factor in factors):
                continue
            if len(factors) != 1 or factors[0].size != samples:
                return False
            factors[0].batch, factors[0].fixed = True, factors[0].fixed or "the samples of a batch"
    return True


def check_template(
    template: Template,
    steps: Sequence[Step | None],
    axis_of: AxisOf,
    network: nn.Module,
    inputs: list[Tensor],
    counts: Mapping[str, int],
) -> None:
    """Run a cut template with the fake weights of a smaller network; raise `TemplateError` where it fails.

    steps: of the operations; their results have the predicted shapes. inputs: of another number of samples than the
    template was made with, so that a number that counts them is noticed.
    """
    graph = template.cut(counts)
    samples = inputs[0].shape[0]
    position = -1

    def check(number: int, result: Any) -> None:
        nonlocal position
        position = number
        step = steps[number]
        results = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []
        for actual, predicted in zip(results, () if step is None else step.results, strict=False):
            if predicted is None or not isinstance(actual, Tensor):
                continue
            sizes = _with_numbers([_sizes(dim, axis_of) for dim in predicted.dims], counts)
            shape = [size.per_sample * samples if isinstance(size, Samples) else size for size in sizes]
            if shape != list(actual.shape):
                name = graph.operations[number].name
                raise TemplateError(f"{name} gives {list(actual.shape)} in the cut graph, not {shape}", step)

    try:
        graph.run(network, inputs, check)
    except TemplateError:
        raise
    except Exception as error:  # operations may raise anything on sizes that do not fit
        name = graph.operations[position + 1].name if position + 1 < len(graph.operations) else "its output"
        step = next((step for step in steps[position + 1 :] if step is not None), None)
        raise TemplateError(f"{name} fails in the cut graph: {first_line(error)}", step) from error

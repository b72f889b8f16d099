"""A program: one network as a graph of operations, made by exporting it, and rewritten by passes.

A pass (see passes/) is a function Program → Program. `print(program)` shows what is left of the network: PyTorch's own
operations, and ours (operations.py), in which several of them are fused. A program has no weights: it runs on tensors
that its caller passes by name, those of one network or of several stacked members (stacking.py, running.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_leaves

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.exports import exclusive_export, quiet_export, without_stack_traces
from structured_ensembles.common.inputs import call_arguments, clone_inputs
from structured_ensembles.common.plurals import counted

LARGEST_BATCH = 16384  # members × samples; export proves that indices of that many fit 32 bits
ALLOWED_INPUT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT)

Node = Any  # fx.Node, whose arguments have a type that checkers cannot follow


class ProgramError(RuntimeError):
    """A network cannot become a program, or a program cannot be rewritten; the message says why."""


@dataclass(frozen=True)
class Program:
    """A network's pass in training, or in prediction.

    names: for the graph's placeholders of weights, the qualified names of parameters and buffers.
    inputs: the placeholders of the network's inputs, in the order of the tensors in them.
    counters: buffers to which every pass adds one.
    factors: for the placeholders of factors (members, channels) that the members' outputs are scaled by, the layers.
    members: how many members the program computes at a time, see passes/stack.py.
    """

    graph: fx.Graph
    names: Mapping[str, str]
    inputs: tuple[str, ...]
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    counters: tuple[str, ...] = ()
    factors: Mapping[str, str] = field(default_factory=dict)
    members: int = 1

    def __str__(self) -> str:
        shown = {**self.names, **{placeholder: f"factors of {layer}" for placeholder, layer in self.factors.items()}}
        head = f"program of {counted(self.members, 'member')}"
        lines = [
            f"  {node.name} = {_operation(node)}({_arguments(node, shown)})"
            for node in self.nodes
            if node.op == "call_function"
        ]
        return "\n".join([head, *lines, f"  return {self.output.name}"])

    @property
    def nodes(self) -> list[Node]:
        """Return the graph's nodes, in order."""
        return list(self.graph.nodes)

    @property
    def output(self) -> Node:
        """Return the node whose value is the network's output."""
        (returned,) = next(node for node in self.nodes if node.op == "output").args[0]
        return returned

    def copy(self) -> Program:
        """Copy the graph, so that a pass can rewrite it."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, copies, return_output_node=True)
        assert isinstance(result, tuple)
        graph.output(result[0])
        # A copy has another name where that of the original is one of Python's, such as `input`.
        new = {node.name: copy.name for node, copy in copies.items() if node.op == "placeholder"}
        return replace(
            self,
            graph=graph,
            names={new[placeholder]: name for placeholder, name in self.names.items()},
            inputs=tuple(new[placeholder] for placeholder in self.inputs),
            factors={new[placeholder]: layer for placeholder, layer in self.factors.items()},
            constants={new[placeholder]: tensor for placeholder, tensor in self.constants.items()},
        )


Pass = Callable[[Program], Program]


def export_program(network: nn.Module, example: Any, training: bool = True) -> Program:
    """Export the pass of a network for batches of any size. Raises `ProgramError` where that is impossible.

    example: inputs of at least two samples; only their shapes and types matter. training: in training mode, or in
    evaluation mode, as a prediction runs.
    """
    positional, named = call_arguments(clone_inputs(example))  # export takes one tensor given twice for one input
    batch = Dim("batch", min=2, max=LARGEST_BATCH)
    shapes = torch.export.ShapesCollection()  # finds each tensor's place in the signature, `*inputs` included
    for tensor in tree_leaves((positional, named)):
        shapes[tensor] = {0: batch}
    modes = {layer: layer.training for layer in network.modules()}
    try:
        with exclusive_export(), warnings.catch_warnings(), quiet_export(), without_stack_traces():
            warnings.simplefilter("ignore")
            network.train(training)
            dynamic = shapes.dynamic_shapes(network, positional, named)
            exported = torch.export.export(network, positional, named, strict=False, dynamic_shapes=dynamic)
    except Exception as error:
        raise ProgramError(f"the network cannot be exported: {first_line(error)}") from error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    return _merge_aliases(_convert(exported), network)


def _merge_aliases(program: Program, network: nn.Module) -> Program:
    """Give a tensor that the network has under several names, as in a wrapper, one placeholder.

    Otherwise a norm would update its statistics under one name, and leave them under the others.
    """
    tensors = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }
    first: dict[int, Node] = {}
    names = {}
    for node in program.nodes:
        if node.op != "placeholder" or node.name not in program.names:
            continue
        placeholder, name = node.name, program.names[node.name]
        kept = first.setdefault(id(tensors[name]), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
            continue
        names[placeholder] = name
    return replace(program, names=names)


def _convert(exported: torch.export.ExportedProgram) -> Program:
    """Convert an exported network to a `Program`. Raises `ProgramError` for what programs do not have."""
    signature = exported.graph_signature
    if len(signature.output_specs) != 1 or signature.output_specs[0].kind is not OutputKind.USER_OUTPUT:
        raise ProgramError("the network returns more than one tensor")
    other_kinds = [spec.kind.name for spec in signature.input_specs if spec.kind not in ALLOWED_INPUT_KINDS]
    if other_kinds:
        raise ProgramError(f"the exported network takes inputs of kind {other_kinds[0]}")
    names, constants, inputs = {}, {}, []
    for spec in signature.input_specs:
        if not hasattr(spec.arg, "name"):
            raise ProgramError("the network takes inputs that are not tensors")
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(spec.arg.name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            constants[spec.arg.name] = exported.constants[spec.target]
        else:
            assert spec.target is not None
            names[spec.arg.name] = spec.target
    program = Program(exported.graph, names, tuple(inputs), constants).copy()
    for node in program.nodes:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)  # types are asserted as at export; a program also runs in others
    for node in program.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise ProgramError(f"the exported network has a node of kind {node.op}")
    if not isinstance(program.output, fx.Node) or not isinstance(value_of(program.output), Tensor):
        raise ProgramError("the network returns something that is not a tensor")
    return program


def value_of(node: Node) -> Any:
    """Return the fake value that export has seen at a node; None for nodes that a pass has made."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    """Tell whether a node's value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(value_of(node), Tensor)


def shape_of(node: Node) -> tuple[Any, ...]:
    """Return a tensor's shape at export; the batch dimension is symbolic."""
    return tuple(value_of(node).shape)


def _operation(node: Node) -> str:
    """Name the operation of a node, as `print(program)` shows it."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0] if isinstance(node.target, torch._ops.OpOverload) else name


def _arguments(node: Node, names: Mapping[str, str]) -> str:
    """Format the arguments of a node, weights by their names in the network."""

    def format_value(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names.get(value.name, value.name)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(format_value, value))}]"
        return f"{value}"

    texts = [format_value(value) for value in node.args]
    options = {key: value for key, value in node.kwargs.items() if value is not None and value is not False}
    return ", ".join(texts + [f"{key}={format_value(value)}" for key, value in options.items()])


def last_uses(program: Program) -> dict[Node, list[Node]]:
    """Return for each node the values that no later node reads."""
    last: dict[Node, Node] = {}
    for node in program.nodes:
        for argument in node.all_input_nodes:
            last[argument] = node
    uses: dict[Node, list[Node]] = {}
    for argument, node in last.items():
        uses.setdefault(node, []).append(argument)
    return uses

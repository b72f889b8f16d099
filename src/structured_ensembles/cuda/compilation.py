"""compile_networks(): programs for networks in training, one for all that can share it.

Every program is checked before it is used, in double precision and against the networks themselves: outputs, gradients
and statistics. An operation that export has left out, a pass that is wrong and padding that changes a result are found
here, not in somebody's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from structured_ensembles.common.inputs import Inputs, call, clone_inputs, map_inputs, tensors_in
from structured_ensembles.cuda.capture import host_state
from structured_ensembles.cuda.channel_padding import Shapes, common_network, shapes_of
from structured_ensembles.cuda.operations import (
    conv_norm,
    member_conv,
    member_dropout,
    member_linear,
    predict_conv,
    rank_one_weights,
)
from structured_ensembles.cuda.passes import (
    add_factors,
    collect_counters,
    fuse_convolutions,
    fuse_norms,
    fuse_subsampling,
    remove_inplace,
    replace_dropout,
    replace_layers,
    stack_members,
)
from structured_ensembles.cuda.program import Node, Pass, Program, ProgramError, export_program
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack, unpadded
from structured_ensembles.data.random_states import preserve_random_states
from structured_ensembles.networks.copying import clear_hooks, clone_model
from structured_ensembles.networks.hooks import watching
from structured_ensembles.networks.rank_one import RankOneMembers
from structured_ensembles.tracing.fake_model import first_line

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Compiled:
    """A program, the networks that it computes (by their numbers), and the shapes of its stacked tensors.

    bfloat16: the placeholders of weights that are cast, as autocast would.
    """

    program: Program
    numbers: tuple[int, ...]
    shapes: Shapes
    bfloat16: frozenset[str]

    def of_members(self, count: int) -> Compiled:
        """Return the same program for another number of members, among those that it was checked with."""
        return replace(self, program=replace(self.program, members=count))

    @property
    def draws(self) -> bool:
        """Tell whether the program draws random numbers (dropout)."""
        return _draws(self.program)


def compile_networks(
    networks: Sequence[nn.Module], example: Inputs, bfloat16: bool, together: bool, tell: Callable[[str], None]
) -> list[Compiled]:
    """Compile the training passes of networks. Networks that cannot be compiled are in none of the results.

    example: at least two samples. bfloat16: whether passes compute in it. together: whether networks may share a
    program. tell: called with a sentence for every fallback.
    """
    groups = alike(networks) if together else [(number,) for number in range(len(networks))]
    return compile_groups(groups, lambda numbers: _compile(networks, numbers, example, bfloat16), tell)


def compile_groups(
    groups: Sequence[tuple[int, ...]], compile_group: Callable[[tuple[int, ...]], Compiled], tell: Callable[[str], None]
) -> list[Compiled]:
    """Compile groups of networks, given by their numbers, to one program each; where that fails, one by one."""
    results: list[Compiled] = []
    with preserve_random_states():  # a network may draw from them, in export and in trials
        for numbers in groups:
            try:
                results.append(compile_group(numbers))
                continue
            except ProgramError as error:
                if len(numbers) == 1:
                    tell(f"PyTorch's own kernels are used, slower: {error}")
                    continue
                tell(f"members are computed one by one, slower: {error}")
            results += compile_groups([(number,) for number in numbers], compile_group, tell)
    return results


def compile_network(network: nn.Module, example: Inputs) -> Program:
    """Export a network in training and run all passes."""
    passes = (
        collect_counters, remove_inplace, replace_layers, replace_dropout, fuse_subsampling, fuse_norms,
        fuse_convolutions,
    )  # fmt: skip
    return rewrite_by(passes, export_program(network, example))


def compile_rank_one(rank_one: RankOneMembers, example: Inputs) -> Program:
    """Export the network that rank-one members share, without its hooks, run all passes, and add the factors."""
    network = clone_model(rank_one.network)
    clear_hooks(network)
    passes = (collect_counters, remove_inplace, replace_layers, replace_dropout, fuse_subsampling, fuse_norms)
    program = rewrite_by(passes, export_program(network, example))
    program = add_factors(program, rank_one.layers, rank_one.members)
    names = {placeholder: rank_one.prefix + name for placeholder, name in program.names.items()}
    return replace(program, names=names, counters=tuple(rank_one.prefix + name for name in program.counters))


def rewrite_by(passes: Sequence[Pass], program: Program) -> Program:
    """Run passes. Raises `ProgramError` if one fails, or for what no program can have."""
    for rewrite in passes:
        try:
            program = rewrite(program)
        except ProgramError:
            raise
        except Exception as error:  # a graph that a pass did not foresee must not end somebody's training
            raise ProgramError(f"{rewrite.__name__} fails: {first_line(error)}") from error
    _check_randomness(program)
    return program


def _compile(networks: Sequence[nn.Module], numbers: tuple[int, ...], example: Inputs, bfloat16: bool) -> Compiled:
    """Compile the networks of these numbers to one program and check it. Raises `ProgramError` if that fails."""
    group = [networks[number] for number in numbers]
    refuse_hooks(group)
    rank_one = getattr(group[0], "rank_one", None)
    if isinstance(rank_one, RankOneMembers):
        program = compile_rank_one(rank_one, example)
        check_program(program, group, {}, example)
        return Compiled(program, numbers, {}, frozenset(castable(program, group[0]) if bfloat16 else ()))
    wide, shapes = common_network(group, example, multiple=8 if bfloat16 else 1)
    program = stack_members(compile_network(wide, example), len(group))
    if len(group) > 1 and _draws(program) and any(shapes_of(network) != shapes_of(group[0]) for network in group):
        raise ProgramError("their widths differ, and dropout draws a number for each channel")
    check_program(program, group, shapes, example)
    return Compiled(program, numbers, shapes, frozenset(castable(program, wide) if bfloat16 else ()))


def alike(networks: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """Group the networks that may share a program: those with the same layers and tensors, whatever their widths."""
    groups: dict[object, list[int]] = {}
    for number, network in enumerate(networks):
        tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
        layers = tuple((name, type(layer)) for name, layer in network.named_modules())
        tensor_kinds = tuple((name, tensor.dim(), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
        alone = number if hasattr(network, "num_members") else None
        groups.setdefault((layers, tensor_kinds, alone), []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def refuse_hooks(networks: Sequence[nn.Module]) -> None:
    """Raise `ProgramError` for a network with hooks, which a program would not call."""
    if any(has_hooks(network) for network in networks):
        raise ProgramError("the network has hooks")


def has_hooks(network: nn.Module) -> bool:
    """Tell whether any module, parameter or global hook would see what the network computes.

    Those that are part of the network are exported with it.
    """
    everywhere = any(getattr(torch.nn.modules.module, f"_global{hooks}") for hooks in HOOKS)
    of_modules = any(watching(getattr(layer, hooks).values()) for layer in network.modules() for hooks in HOOKS)
    return everywhere or of_modules or any(getattr(p, hooks) for p in network.parameters() for hooks in PARAMETER_HOOKS)


def _draws(program: Program) -> bool:
    """Tell whether a program draws random numbers."""
    return any(node.target is member_dropout for node in program.nodes)


def _check_randomness(program: Program) -> None:
    """Raise `ProgramError` for random numbers other than dropout's, and for sparse gradients."""
    for node in program.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags and not _is_attention_without_dropout(node):
                raise ProgramError(f"{node.target} draws random numbers, for which members have no generator")
            if node.target is torch.ops.aten.embedding.default and True in node.args[4:]:
                raise ProgramError("an embedding has sparse gradients")


def _is_attention_without_dropout(node: Node) -> bool:
    """Tell whether a node is an attention that drops nothing out, and so draws no numbers."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return False
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return dropout == 0.0


def castable(program: Program, network: nn.Module) -> set[str]:
    """Return the placeholders of weights and biases that only our convolutions and linear layers use.

    A buffer is not cast: the stack's values go back to the networks.
    """
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    # By operation, the arguments that are cast: from the first to the end.
    ends = {
        conv_norm: (1, 2),
        member_conv: (1, 3),
        member_linear: (1, 3),
        predict_conv: (1, 2),
        rank_one_weights: (0, 1),
    }

    def is_cast_by(user: Node, node: Node) -> bool:
        first, end = ends.get(user.target, (0, 0))
        return node in user.args[first:end] and node not in (*user.args[:first], *user.args[end:])

    return {
        node.name
        for node in program.nodes
        if node.op == "placeholder" and program.names.get(node.name) in parameters and node.users
        if all(is_cast_by(user, node) for user in node.users)
    }


class _WithoutDropout(TorchFunctionMode):
    """A mode in which dropout returns its input, so that outputs can be compared; it lists the rates.

    A program and a network draw different masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.functional.dropout, torch.dropout):
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
    ) -> Tensor:
        """Return the input and note the rate; the signature is that of both functions."""
        if p and training and train:
            self.rates.append(p)
        return input


def check_program(program: Program, networks: Sequence[nn.Module], shapes: Shapes, example: Inputs) -> None:
    """Raise `ProgramError` unless a program computes what the networks do: tried in double precision.

    One copy of a network exists at a time: a GPU that has memory for training large ones has it for this, too. Where it
    has not, that is a `ProgramError`: without a program, the networks may train all the same.
    """
    try:
        device = next(networks[0].parameters()).device
        inputs = map_inputs(lambda x: x.to(device, torch.float64 if x.is_floating_point() else x.dtype), example)
        stack = Stack(program, networks, shapes, double=True)
        run = Run(program, stack.weights, stack.learned, generators=None)
        outputs = run.forward([torch.cat([x] * len(networks)) for x in tensors_in(inputs)])
        gradients = run.backward(2 * outputs)
        statistics = {name: tensor for name, tensor in stack.weights.items() if name not in stack.learned}
        del stack, run
        for number, (network, output) in enumerate(zip(networks, outputs.chunk(len(networks)), strict=True)):
            # No variable holds the copy, which would keep it until the next one is made.
            _check_member(clone_model(network).double().train(), inputs, output, gradients, statistics, program, number)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(f"the program fails: {first_line(error)}") from error


def _check_member(
    trial: nn.Module,
    inputs: Inputs,
    output: Tensor,
    gradients: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
    program: Program,
    number: int,
) -> None:
    """Compare a member's output, gradients and statistics in the program with those of its network.

    trial: a copy of the network. output: of the program, (samples, …). gradients, statistics: stacked, by placeholder.
    number: of the member in the stack.
    """
    rates = [node.args[2] for node in program.nodes if node.target is member_dropout]
    before = host_state([trial])
    with torch.enable_grad(), _WithoutDropout() as without:
        expected = call(trial, clone_inputs(inputs))  # it may work in place on them
    if without.rates != rates:  # outputs do not tell: they are compared without dropout
        raise ProgramError(f"a network drops out at rates {without.rates}, the program at {rates}")
    if host_state([trial]) != before:
        raise ProgramError("the network draws random numbers, or keeps count, on the host")
    parameters = {name: p for name, p in trial.named_parameters(remove_duplicate=False) if p.requires_grad}
    buffers = dict(trial.named_buffers(remove_duplicate=False))
    network_gradients = torch.autograd.grad(
        expected.square().sum(), list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    program_gradients: dict[int, Tensor] = {}  # by parameter: one with several names has one gradient
    for placeholder, stacked in gradients.items():
        parameter = parameters[program.names[placeholder]]
        gradient = unpadded(stacked[number], parameter.shape)
        earlier = program_gradients.get(id(parameter))
        program_gradients[id(parameter)] = gradient if earlier is None else earlier + gradient
    pairs = [("output", expected, output)]
    for (name, parameter), gradient in zip(parameters.items(), network_gradients, strict=True):
        pairs.append((name, gradient, program_gradients.get(id(parameter), torch.zeros_like(parameter))))
    for placeholder, name in program.names.items():
        if name in buffers and name not in program.counters:
            pairs.append((name, buffers[name], unpadded(statistics[placeholder][number], buffers[name].shape)))
    for name, of_network, of_program in pairs:
        scale = of_network.detach().abs().max().item() if of_network.numel() else 0.0
        tolerance = 1e-9 + 1e-7 * scale
        if of_network.shape != of_program.shape or not torch.allclose(
            of_network.to(of_program.dtype), of_program, rtol=1e-6, atol=tolerance, equal_nan=True
        ):
            raise ProgramError(f"the program computes another {name!r} than the network")

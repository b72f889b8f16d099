"""compile_networks(): programs for networks in training, one for all that can share it.

Every program is checked before it is used, see program_check.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs
from structured_ensembles.cuda.channel_padding import Shapes, common_network, shapes_of
from structured_ensembles.cuda.operations import (
    conv_norm,
    member_conv,
    member_dropout,
    member_linear,
    predict_conv,
    rank_one_weights,
    scaled_conv,
)
from structured_ensembles.cuda.passes import (
    add_factors,
    add_scales,
    collect_counters,
    fuse_convolutions,
    fuse_norms,
    fuse_scales,
    fuse_subsampling,
    remove_inplace,
    replace_dropout,
    replace_layers,
    stack_members,
)
from structured_ensembles.cuda.program import Node, Pass, Program, ProgramError, export_program
from structured_ensembles.cuda.program_check import check_program
from structured_ensembles.data.random_states import preserve_random_states
from structured_ensembles.networks.copying import clear_hooks, clone_model
from structured_ensembles.networks.hooks import watching
from structured_ensembles.networks.rank_one import RankOneMembers

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
    """Compile the training passes of networks to programs, without those of networks that cannot be compiled.

    example: at least two samples. bfloat16: whether passes compute in it. together: whether networks may share a
    program. tell: called with a sentence for every fallback.
    """
    groups = group_alike(networks) if together else [(number,) for number in range(len(networks))]
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
            gc.collect()  # a run of a program refers to itself: what a failed check had allocated would stay
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


def compile_scaled(network: nn.Module, layers: Mapping[str, int], example: Inputs) -> Program:
    """Export a frozen network in training, run all passes, and scale the outputs of layers, see `add_scales`."""
    refuse_hooks([network])
    program = export_program(network, example)
    program = rewrite_by((collect_counters, remove_inplace, replace_layers, replace_dropout), program)
    program = add_scales(program, layers)
    return rewrite_by((fuse_scales, fuse_subsampling, fuse_norms, fuse_convolutions), program)


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
        return Compiled(program, numbers, {}, frozenset(castable_placeholders(program, group[0]) if bfloat16 else ()))
    wide, shapes = common_network(group, example, multiple=8 if bfloat16 else 1)
    program = stack_members(compile_network(wide, example), len(group))
    if len(group) > 1 and _draws(program) and any(shapes_of(network) != shapes_of(group[0]) for network in group):
        raise ProgramError("their widths differ, and dropout draws a number for each channel")
    check_program(program, group, shapes, example)
    return Compiled(program, numbers, shapes, frozenset(castable_placeholders(program, wide) if bfloat16 else ()))


def group_alike(networks: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """Group the networks that may share a program: those with the same layers, tensors and ties, of whatever widths."""
    groups: dict[object, list[int]] = {}
    for number, network in enumerate(networks):
        tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
        layers = tuple((name, type(layer)) for name, layer in network.named_modules())
        first_names: dict[int, str] = {}  # of a tied tensor, its first name
        tensor_kinds = tuple(
            (name, first_names.setdefault(id(tensor), name), tensor.dim(), tensor.dtype, tensor.requires_grad)
            for name, tensor in tensors
        )
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


def castable_placeholders(program: Program, network: nn.Module) -> set[str]:
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
        scaled_conv: (1, 3),
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

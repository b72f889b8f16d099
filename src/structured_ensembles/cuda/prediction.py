"""Predict by programs: members in evaluation mode, and one launch for each layer of all of them.

Batch norms are a factor and a shift in the convolution before them, computed by the kernel from the running statistics.
So the stack has copies of the members' own tensors and nothing derived: `MemberPredictions` copies them in one launch,
at every prediction, and whatever has changed the weights in place is seen, as it is by the networks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import (
    Inputs,
    batch_size,
    call,
    clone_inputs,
    join_batches,
    map_inputs,
    select_rows,
    tensors_in,
)
from structured_ensembles.cuda.capture import host_state
from structured_ensembles.cuda.channel_padding import Shapes, common_network
from structured_ensembles.cuda.compilation import (
    Compiled,
    castable_placeholders,
    compile_groups,
    group_alike,
    refuse_hooks,
    rewrite_by,
)
from structured_ensembles.cuda.passes import (
    fuse_predictions,
    fuse_running_norms,
    fuse_subsampling,
    remove_inplace,
    replace_dropout,
    replace_layers,
    share_inputs,
    stack_members,
)
from structured_ensembles.cuda.program import LARGEST_BATCH, Program, ProgramError, export_program
from structured_ensembles.cuda.running import Run
from structured_ensembles.cuda.stacking import Stack
from structured_ensembles.networks.copying import clone_model

FEW = 4  # samples that a program is checked with
WIDEST_LAYER = 128  # channels of a convolution; wider ones keep a GPU busy one by one


def compile_predictions(
    networks: Sequence[nn.Module], inputs: Inputs, bfloat16: bool, tell: Callable[[str], None]
) -> list[Compiled]:
    """Compile the predictions of networks on batches like `inputs` to programs, without those that would not pay.

    A program pays for networks with narrow convolutions; cuDNN's kernels are made for wide ones. bfloat16: whether
    passes compute in it, as under autocast. tell: called with a sentence for every fallback.
    """
    groups = [numbers for numbers in group_alike(networks) if all(_is_narrow(networks[number]) for number in numbers)]
    return compile_groups(groups, lambda numbers: _compile(networks, numbers, inputs, bfloat16), tell)


def compile_prediction(network: nn.Module, example: Inputs, members: int = 1) -> Program:
    """Export a network in evaluation mode, run all passes, and stack so many members.

    example: at least two samples.
    """
    passes = (
        remove_inplace, replace_layers, replace_dropout, fuse_subsampling, fuse_running_norms, fuse_predictions,
    )  # fmt: skip
    program = rewrite_by(passes, export_program(network, example, training=False))
    program = share_inputs(stack_members(program, members))
    used = {node.name for node in program.nodes if node.op == "placeholder" and node.users}
    return replace(program, names={one: name for one, name in program.names.items() if one in used})


def _compile(networks: Sequence[nn.Module], numbers: tuple[int, ...], inputs: Inputs, bfloat16: bool) -> Compiled:
    """Compile the networks of these numbers to one program and check it. Raises `ProgramError` if that fails."""
    group = [networks[number] for number in numbers]
    refuse_hooks(group)
    if any(hasattr(network, "num_members") for network in group):
        raise ProgramError("one network computes several members")
    if batch_size(inputs) * len(group) > LARGEST_BATCH:
        raise ProgramError(f"the batches of all members have more than {LARGEST_BATCH} samples")
    few = select_rows(inputs, slice(0, FEW))
    example = join_batches([few, few]) if batch_size(few) == 1 else few
    wide, shapes = common_network(group, example, multiple=8)
    program = compile_prediction(wide, example, len(group))
    compiled = Compiled(program, numbers, shapes, frozenset(castable_placeholders(program, wide) if bfloat16 else ()))
    unfused = next((node.target for node in program.nodes if str(node.target).startswith("aten.conv")), None)
    if unfused is not None:
        raise ProgramError(f"there is no kernel for {unfused} with groups, dilation or uneven windows")
    if compiled.draws:
        raise ProgramError("the network draws random numbers in evaluation mode")
    check_prediction(program, group, shapes, few)
    return compiled


def _is_narrow(network: nn.Module) -> bool:
    """Tell whether there are convolutions, and none is wider than those that our kernels are made for."""
    widths = [max(layer.weight.shape[:2]) for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    return 0 < max(widths, default=0) <= WIDEST_LAYER


def check_prediction(program: Program, networks: Sequence[nn.Module], shapes: Shapes, inputs: Inputs) -> None:
    """Raise `ProgramError` unless a program predicts what the networks do: tried in double precision."""
    try:
        exact = map_inputs(lambda x: x.double() if x.is_floating_point() else x, inputs)
        weights = Stack(program, networks, shapes, double=True).weights
        outputs = Run(program, weights, set(), generators=None).forward(tensors_in(exact))
        del weights  # one copy of a network exists at a time, beside nothing else
        together = torch.cat([_predict_exactly(network, exact) for network in networks])
    except (ProgramError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ProgramError(f"the program fails: {first_line(error)}") from error
    finite = together.isfinite()
    tolerance = 1e-9 + 1e-7 * (together[finite].abs().max().item() if finite.any() else 0.0)
    if together.shape != outputs.shape or not torch.allclose(
        together, outputs.to(together.dtype), rtol=1e-6, atol=tolerance, equal_nan=True
    ):
        raise ProgramError("the program predicts other outputs than the network")


@torch.no_grad()
def _predict_exactly(network: nn.Module, inputs: Inputs) -> Any:
    """Return the outputs of a copy in double precision; raise `ProgramError` for draws or counts on the host."""
    trial = clone_model(network).double().eval()
    before = host_state([trial])
    outputs = call(trial, clone_inputs(inputs))
    if host_state([trial]) != before:
        raise ProgramError("the network draws random numbers, or keeps count, on the host")
    return outputs


class MemberPredictions:
    """Predictions of members that share a program, on tensors that stay where they are, so that they can be captured.

    networks: all of an ensemble's, of which the program computes those that `compiled` names.
    """

    def __init__(self, compiled: Compiled, networks: Sequence[nn.Module]) -> None:
        self.numbers, self.program = compiled.numbers, compiled.program
        members = [networks[number] for number in compiled.numbers]
        self.stack = Stack(compiled.program, members, compiled.shapes, compiled.bfloat16)
        self._reload = self.stack.reloader()

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> Tensor:
        """Return outputs (members, batch, …) for a batch that all members share, by the weights of this moment."""
        self._reload()
        run = Run(self.program, self.stack.weights, set(), generators=None)
        return run.forward(tensors_in(inputs)).unflatten(0, (len(self.numbers), -1))

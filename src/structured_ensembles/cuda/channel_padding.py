"""Common widths for members of different widths: channels of zeros, which change nothing.

Members that share a program need tensors of one shape. And in bfloat16, GPUs load eight channels at a time: widths such
as the 4, 7 and 13 of a ResNet20 with four fifths pruned are slow. So where members differ, or widths are not multiples
of eight, channels are added. Their weights are zero, and so are those that read them; what they would learn is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from structured_ensembles.channels import trace
from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs
from structured_ensembles.cuda.program import ProgramError
from structured_ensembles.networks.resizing import Axis, kept_size, resize

Shapes = Mapping[str, tuple[int, ...]]
MAX_PADDING = 1.5  # times the channels of the members; with more, a common program is not worth it
LAYERS = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)


def shapes_of(network: nn.Module) -> Shapes:
    """Return the shapes of all parameters and buffers, by name."""
    tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def common_network(networks: Sequence[nn.Module], example: Inputs, multiple: int) -> tuple[nn.Module, Shapes]:
    """Return a network that is wide enough for each of `networks`, and the shapes of its tensors.

    multiple: widths become multiples of it, where that is possible. Its weights mean nothing. Where nothing has to be
    padded, it is the first of the networks. Raises `ProgramError` if a width cannot be padded that would have to be.
    """
    first, shapes = networks[0], [shapes_of(network) for network in networks]
    alike = all(of_member == shapes[0] for of_member in shapes)
    if alike and not _uneven(first, multiple):
        return first, shapes[0]
    try:
        graph = trace(first, example, coupled=True, graphs=False)
    except Exception as error:
        if alike:
            return first, shapes[0]
        raise ProgramError(f"the network cannot be traced: {first_line(error)}") from error
    paddable = set(graph.prunable) - _unpaddable(first, graph.axes)
    widths = [{**graph.prunable, **_widths(graph.axes, of_member)} for of_member in shapes]
    common: dict[str, int] = {}
    for group in graph.prunable:
        sizes = [of_member[group] for of_member in widths]
        if group in paddable:
            common[group] = max(sizes) + -max(sizes) % multiple
        elif len(set(sizes)) > 1:
            raise ProgramError(f"widths of {group!r} differ, and channels of zeros would change the result")
    before = sum(of_member[group] for of_member in widths for group in common)
    if sum(common.values()) * len(networks) > MAX_PADDING * before and len(networks) > 1:
        raise ProgramError("their widths differ too much")
    wide = resize(first, graph.axes, common)
    return wide, shapes_of(wide)


def _uneven(network: nn.Module, multiple: int) -> bool:
    """Tell whether a convolution has a number of channels that is not a multiple.

    Not by the shape of its weight: to read a weight under `spectral_norm` in training changes buffers.
    """
    return any(
        layer.out_channels % multiple
        for layer in network.modules()
        if isinstance(layer, nn.Conv2d) and layer.groups == 1
    )


def _unpaddable(network: nn.Module, axes: Mapping[str, Sequence[Axis]]) -> set[str | None]:
    """Return the groups that cannot be padded: channels of tensors beside those of `LAYERS`.

    Also groups on an axis that has several positions for a channel, or other groups beside it.
    """
    paddable = {
        f"{name}.{tensor}"
        for name, layer in network.named_modules()
        if type(layer) in LAYERS and not (isinstance(layer, nn.Conv2d) and layer.groups > 1)
        for tensor in layer.state_dict(keep_vars=False)
    }
    return {
        span.group
        for name, tensor_axes in axes.items()
        for axis in tensor_axes
        for span in axis
        if name not in paddable or len(axis) > 1 or span.block > 1
    }


def _widths(axes: Mapping[str, Sequence[Axis]], shapes: Shapes) -> dict[str, int]:
    """Return the channels of groups in a network of the same kind, from the shapes of its tensors.

    Of the groups that have an axis for themselves; the others must have as many as in the network that was traced.
    """
    widths: dict[str, int] = {}
    for name, tensor_axes in axes.items():
        for dim, axis in enumerate(tensor_axes):
            if len(axis) == 1 and axis[0].group is not None:
                size = shapes[name][dim] // axis[0].block
                if widths.setdefault(axis[0].group, size) != size:
                    raise ProgramError(f"{name!r} does not fit the other tensors of {axis[0].group!r}")
    for name, tensor_axes in axes.items():
        expected = tuple(kept_size(axis, widths) for axis in tensor_axes)
        if name in shapes and expected != shapes[name]:
            raise ProgramError(f"{name!r} is {shapes[name]}, not {expected}")
    return widths

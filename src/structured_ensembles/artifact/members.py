"""Members of a file: the base network that it names, converted, cut, and filled with each member's tensors.

Nothing is built that the file's own tensors do not justify.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.extraction import rebuild_graph_network
from structured_ensembles.networks.conversions import find_rebuilder
from structured_ensembles.networks.copying import copy_with
from structured_ensembles.networks.provenance import check_shapes, read_bases, restore_base
from structured_ensembles.networks.resizing import restore_size_attributes, set_sizes
from structured_ensembles.networks.state import all_tensors, unsaved_buffers
from structured_ensembles.storage.container import build_from_json, check_field, check_leaves, check_list_field
from structured_ensembles.tracing.walk import LAYERS

MAX_SAMPLES = 10_000  # members of one network that have no tensors in the file, such as MC-Dropout's samples
MAX_EMPTY_MEMBERS = 1000  # members without any tensor


def rebuild_members(
    base: nn.Module, structure: Mapping[str, Any], of_members: Sequence[Mapping[str, Tensor]], check_base: bool
) -> list[nn.Module]:
    """Build the members of a file from their base network.

    of_members: the tensors of each. check_base: raise a ValueError if the base is not the one that they were cut from.
    """
    conversions, cuts, attributes = (_per_member(structure, name) for name in ("conversions", "cuts", "attributes"))
    bases = read_bases(structure.get("base_shapes"))
    networks = []
    for number, tensors in enumerate(of_members):
        converted = _convert_base(base, conversions[number], tensors)
        network = _build_member(_cut_base(converted, cuts[number]), tensors, attributes[number])
        if check_base and (number == 0 or converted is not base):  # once for all members that are not converted
            check_shapes(converted, of_members, bases)
        restore_base(network, converted, bases)
        networks.append(network)
    return networks


def split_by_member(structure: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Sort the tensors of a file by member."""
    count = check_field(structure["members"], int, "members")
    if not 0 < count <= max(len(tensors), MAX_EMPTY_MEMBERS):
        raise ValueError(f"it claims {count} members, but holds {len(tensors)} tensors")
    members: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        index, _, tensor_name = name.partition(".")
        if not index.isdecimal() or int(index) >= count:
            raise ValueError(f"{name} belongs to none of its {count} members")
        members[int(index)][tensor_name] = tensor
    return members


def build_base(path: Path, structure: Mapping[str, Any], trust_code: bool, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build the base network; one of the zoo on the meta device, unless it has buffers that the file lacks."""
    model_entry = structure.get("model")

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return build_from_json(path, model_entry, trust_code, tensors=len(tensors))

    names_code = isinstance(model_entry, Mapping) and ":" in str(model_entry.get("name"))
    if names_code:  # which may compute with the tensors it makes
        return build()
    with torch.device("meta"):
        base = build()
    return base if all(f"0.{name}" in tensors for name in unsaved_buffers(base)) else build()


def _convert_base(base: nn.Module, conversion: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Convert the base network to one of several members; return it as it is if it is converted already.

    tensors: those of the member, which bound the size of the result.
    """
    if conversion is None or getattr(base, "conversion", None) == conversion:
        return base
    arguments = dict(conversion)
    rebuild = find_rebuilder(arguments.pop("method"))
    members = check_field(arguments["members"], int, "members")
    layers = check_list_field(arguments["layers"], str, "layers")
    check_field(arguments.get("seed", 0), int, "seed")
    if not len(set(layers)) == len(layers) <= len(tensors) or members > MAX_SAMPLES:
        raise ValueError(f"it is converted to {members} members in {len(layers)} layers, which its tensors do not have")
    return rebuild(base, arguments, tensors)


def _cut_base(base: nn.Module, record: Mapping[str, Any] | None) -> nn.Module:
    """Cut a member out of the graph of the base network, if the file says so; return any other base as it is."""
    if record is None:
        return base
    check_leaves(record, (str, int, bool, type(None)), "cuts")
    return rebuild_graph_network(base, record)


def _build_member(
    base: nn.Module, tensors: Mapping[str, Tensor], attributes: Mapping[str, Any] | None = None
) -> nn.Module:
    """Copy `base` with these tensors in it, whatever their sizes. attributes: sizes that tensors do not tell."""
    expected = {name: (tensor.dim(), _number_type(tensor)) for name, tensor in all_tensors(base).items()}
    stored = {name: (tensor.dim(), _number_type(tensor)) for name, tensor in tensors.items()}
    for name in unsaved_buffers(base) - stored.keys():  # files of earlier versions lack such buffers
        del expected[name]
    if expected != stored:
        differing = sorted(set(expected.items()) ^ set(stored.items()))[0][0]
        raise ValueError(f"{differing} is not in both")

    def replace(name: str, tensor: Tensor) -> Tensor:
        return tensors[name] if name in tensors else tensor.clone()

    network = copy_with(base, replace, replace)
    restore_size_attributes(network, attributes or {})
    for module in network.modules():
        set_sizes(module)
        _check_sizes(module)
    return network


def _number_type(tensor: Tensor) -> str:
    """Name the type of a tensor's numbers, without their precision."""
    floats = "floats" if tensor.is_floating_point() else "whole numbers"
    return "complex" if tensor.is_complex() else "booleans" if tensor.dtype == torch.bool else floats


def _check_sizes(module: nn.Module) -> None:
    """Raise a ValueError if the sizes of a layer's tensors do not agree."""
    tensors = {**module._parameters, **module._buffers}
    weight = tensors.get("weight")
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else getattr(module, "groups", 1)
    if isinstance(module, nn.modules.conv._ConvNd | nn.GroupNorm) and weight is not None and len(weight) % groups:
        raise ValueError(f"{len(weight)} channels cannot be in {groups} groups, in {module}")
    rows = getattr(module, "out_features" if isinstance(module, nn.Linear) else "out_channels", None)
    if isinstance(module, nn.modules.batchnorm._NormBase):
        rows = module.num_features
    for name in ("bias", "running_mean", "running_var"):
        tensor = tensors.get(name)
        if (
            isinstance(module, (*LAYERS, nn.modules.batchnorm._NormBase))
            and tensor is not None
            and tensor.shape != (rows,)
        ):
            raise ValueError(f"{name} has the shape {list(tensor.shape)} in {module}")


def _per_member(structure: Mapping[str, Any], name: str) -> list[dict[str, Any] | None]:
    """Return a list of a file that has an object or None for each member; files of earlier versions lack it."""
    values = structure.get(name) or [None] * structure["members"]
    check_list_field(values, (dict, type(None)), name)
    if len(values) != structure["members"]:
        raise ValueError(f"it has {len(values)} {name} for {structure['members']} members")
    return values

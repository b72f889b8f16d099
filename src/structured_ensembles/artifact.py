"""The file of an ensemble: a safetensors file with the members' weights and the JSON that rebuilds their structure.

No pickle, no code. The JSON names the base network (one of the zoo, or `package.module:function`, which is imported
only if the caller trusts it); a member is the base network with the shapes that its weights have in the file. For a
network that stands for several members, the JSON says how the base network is converted to it. A checksum over the JSON
and every tensor reveals a damaged file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.calibration import Calibration
from structured_ensembles.calibration.conformal import ConformalIntervals
from structured_ensembles.common.checks import check_choice, check_path, check_type
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.data.assembly import Task
from structured_ensembles.data.kinds import Kinds, Normalizations, normalization_from_json
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.extraction import rebuild_graph_network
from structured_ensembles.networks.conversions import find_rebuilder
from structured_ensembles.networks.copying import all_tensors, copy_with, unsaved_buffers
from structured_ensembles.networks.graph_network import GraphNetwork
from structured_ensembles.networks.provenance import (
    check_shapes,
    distinct_bases,
    read_bases,
    restore_base,
    warn_if_unnamed,
)
from structured_ensembles.networks.resizing import restore_size_attributes, set_sizes, size_attributes
from structured_ensembles.selection import Subnet
from structured_ensembles.storage.container import (
    build_from_json,
    check_field,
    check_leaves,
    check_list_field,
    origin_to_json,
    raise_as_artifact_error,
    read_container,
    write_container,
)
from structured_ensembles.storage.weight_encoding import Storage, decode_tensors, encode_tensor
from structured_ensembles.tracing.walk import LAYERS

FORMAT = "structured-ensembles"
# A file is written in the lowest version that can hold it, so that earlier releases can read it: 6 with networks that
# were cut in their graph, or that have grouped convolutions; 5 with Gaussian heads;
# 4 with a calibration, several inputs or normalised columns; 3 with units; 2 with conversions; else 1.
VERSION = 6
Built = TypeVar("Built", bound=nn.Module)
MAX_SAMPLES = 10_000  # members of one network that have no tensors in the file, such as MC-Dropout's samples
LARGEST_INPUT = 2**40  # values; no such tensor is allocated, but torch must be able to count its elements
MAX_EMPTY_MEMBERS = 1000  # members without any tensor


@dataclass(frozen=True)
class Contents:
    """The networks of an ensemble, and those attributes of `Ensemble` that its file keeps, under the same names."""

    networks: Sequence[nn.Module]
    subnets: Sequence[Subnet] | None
    classes: Sequence[str]
    task: Task
    normalization: Normalization | Normalizations | None
    units: Units | None
    gaussian: bool
    calibration: Calibration
    ids: bool
    id_limit: Any
    pixels: bool
    input_shape: Any
    input_kinds: Kinds | None
    target_shape: tuple[int, ...] | None


def save(contents: Contents, path: str | Path, dtype: Storage = "float32") -> int:
    """Write the contents of an ensemble; return the size of the file in bytes.

    dtype: how weights are stored. "float16" halves the file; "int8" quarters it, with one scale per output channel.
        Vectors (biases, norms, rank-one factors) stay as they are. On loading, weights become float32 again; `evaluate`
        shows what it cost.
    """
    path = check_path("path", path)
    if dtype not in get_args(Storage):
        raise ValueError(f"dtype must be one of {', '.join(get_args(Storage))}, not {dtype!r}")
    warn_if_unnamed(contents.networks[0], "model")
    tensors: dict[str, Tensor] = {}
    for index, network in enumerate(contents.networks):
        vectors = getattr(network, "member_vectors", ())
        for name, tensor in all_tensors(network).items():
            tensors |= encode_tensor(f"{index}.{name}", tensor.detach().cpu(), "float32" if name in vectors else dtype)
    conversions = [getattr(network, "conversion", None) for network in contents.networks]
    for conversion in conversions:
        if conversion is not None and conversion["members"] > MAX_SAMPLES:
            raise ValueError(
                f"a network may stand for at most {MAX_SAMPLES} members to be loaded again, not {conversion['members']}"
            )
    normalization = contents.normalization
    structure = {
        "members": len(contents.networks),
        "model": origin_to_json(contents.networks[0]),
        "task": contents.task,
        "classes": list(contents.classes),
        "normalization": None if normalization is None else normalization.to_json(),
        "threshold": contents.calibration.threshold,
        "pixels": contents.pixels,
        "input_shape": contents.input_shape,  # of several inputs, a list or object of shapes
        "ids": contents.ids,
        "id_limit": contents.id_limit,
        "target_shape": contents.target_shape,
        "subnets": None if contents.subnets is None else [json.loads(net.to_json()) for net in contents.subnets],
        "base_shapes": distinct_bases(contents.networks),
        "storage": dtype,
        "torch": torch.__version__,
    }
    version = 1
    for needed, name, value in _later_fields(contents, conversions):
        version, structure[name] = max(version, needed), value
    if normalization is not None and contents.input_kinds is None and not _is_image(contents.input_shape):
        version = max(version, 4)  # earlier versions would take columns for channels of images
    return write_container(path, FORMAT, version, structure, tensors)


def _later_fields(
    contents: Contents, conversions: Sequence[Mapping[str, Any] | None]
) -> Iterator[tuple[int, str, Any]]:
    """Yield the fields that only some ensembles need: the version that introduced each, its name and its value."""
    if any(conversions):
        yield 2, "conversions", conversions
    if contents.units is not None:
        yield 3, "units", contents.units.to_json()
    if contents.calibration.fitted:
        yield 4, "calibration", contents.calibration.to_json()
    if contents.input_kinds is not None:
        yield 4, "input_kinds", contents.input_kinds
    if contents.gaussian:
        yield 5, "gaussian", True
    cuts = [network.record if isinstance(network, GraphNetwork) else None for network in contents.networks]
    if any(cuts):
        yield 6, "cuts", cuts
    attributes = [size_attributes(network) for network in contents.networks]
    if any(attributes):
        yield 6, "attributes", attributes


def _is_image(shape: Any) -> bool:
    """Tell whether samples of this shape are images; true of an unknown shape."""
    return shape is None or len(shape) == 3


def load(
    path: str | Path, make: Callable[[Contents], Built], model: nn.Module | None = None, trust_code: bool = False
) -> Built:
    """Read an ensemble; it is in evaluation mode, on the CPU.

    make: builds the ensemble from the contents of the file.
    model: a base network such as the members were cut out of or converted from, or a member itself, if the file does
        not name one of the zoo; it is not changed.
    trust_code: let the file name a function of an installed package that makes the base network, and call it.
    """
    path = check_path("path", path)
    if model is not None:
        check_type("model", model, nn.Module)
    structure, stored = read_container(path, FORMAT, VERSION, "an ensemble")
    with raise_as_artifact_error(f"{path} has an invalid calibration"):
        calibration = _parse_calibration(structure)
    with raise_as_artifact_error(f"{path} is not an ensemble that this version can read"):
        for name in ("storage", "torch"):
            check_field(structure.get(name, ""), str, name)
        check_leaves(structure.get("threshold"), (int, float), "threshold")
        tensors = decode_tensors(stored)
        members, conversions = _split_by_member(structure, tensors)
    base = model if model is not None else _build_base(path, structure, trust_code, tensors)
    with raise_as_artifact_error(f"{path} does not fit the base network"):
        converted = [
            _convert_base(base, conversion, tensors) for conversion, tensors in zip(conversions, members, strict=True)
        ]
        sources = [
            _cut_base(source, cut) for source, cut in zip(converted, _per_member(structure, "cuts"), strict=True)
        ]
        networks = [
            _build_member(network, tensors, attributes)
            for network, tensors, attributes in zip(sources, members, _per_member(structure, "attributes"), strict=True)
        ]
        bases = read_bases(structure.get("base_shapes"))
        for network, source in zip(networks, converted, strict=True):
            if model is not None:
                check_shapes(source, members, bases)
            restore_base(network, source, bases)
        contents = Contents(networks, calibration=calibration, **_parse_attributes(structure))
        ensemble = make(contents)
    if model is None and ":" not in structure["model"]["name"]:
        with raise_as_artifact_error(
            f"{path} holds networks that do not run on its inputs (model= would load it as it is)"
        ):
            _check_runs(ensemble, contents)
    return ensemble.eval()


@torch.no_grad()
def _check_runs(ensemble: nn.Module, contents: Contents) -> None:
    """Run networks of the zoo on inputs of the file's shape, on the meta device, which takes no memory."""
    shape = contents.input_shape
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        return
    if math.prod(shape) > LARGEST_INPUT:
        raise ValueError(f"its inputs have {math.prod(shape):.3g} values each")

    def to_meta(_: str, tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    layers = [module for module in ensemble.modules() if isinstance(module, LAYERS)]
    dtypes = {parameter.dtype for layer in layers for parameter in layer.parameters(recurse=False)}
    if len(dtypes) > 1:  # the meta device would not notice
        raise ValueError(f"its layers have weights of {' and '.join(sorted(map(str, dtypes)))}")
    dtype = torch.uint8 if contents.pixels else torch.int64 if contents.ids else torch.float32
    outputs = copy_with(ensemble, to_meta, to_meta).eval()(torch.zeros(2, *shape, dtype=dtype, device="meta"))
    rule = contents.calibration.conformal
    if isinstance(rule, ConformalIntervals):
        rule.interval(*mean_and_spread(outputs, contents.gaussian))  # fails unless there is one for each value


def _check_nested(value: Any, leaf_type: type, name: str) -> Any:
    """Return a list, dict or None whose leaves are of this type; raise an error if it is anything else."""
    return check_leaves(check_field(value, (list, dict, type(None)), name), leaf_type, name)


def _parse_attributes(structure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Contents` besides networks and calibration, checked."""
    subnets = structure["subnets"]
    check_choice("task", structure["task"], get_args(Task))
    for name in ("normalization", "units"):
        check_leaves(structure.get(name), (int, float), name)
    return {
        "subnets": None if subnets is None else [Subnet.from_json(json.dumps(subnet)) for subnet in subnets],
        "classes": tuple(check_list_field(structure["classes"], str, "classes")),
        "task": structure["task"],
        "normalization": normalization_from_json(structure["normalization"]),
        "units": Units.from_json(structure.get("units")),
        "gaussian": check_field(structure.get("gaussian", False), bool, "gaussian"),
        "ids": check_field(structure.get("ids", False), bool, "ids"),
        "id_limit": check_leaves(structure.get("id_limit"), int, "id_limit"),
        "pixels": check_field(structure.get("pixels", False), bool, "pixels"),  # files of earlier versions lack it
        "input_shape": _check_nested(structure["input_shape"], int, "input_shape"),
        "input_kinds": _check_nested(structure.get("input_kinds"), str, "input_kinds"),
        "target_shape": _check_nested(structure.get("target_shape"), int, "target_shape"),  # not in earlier ones
    }


def _split_by_member(
    structure: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Any] | None]]:
    """Sort the tensors by member; return them and the conversion of each member, or None."""
    count = check_field(structure["members"], int, "members")
    if not 0 < count <= max(len(tensors), MAX_EMPTY_MEMBERS):
        raise ValueError(f"it claims {count} members, but holds {len(tensors)} tensors")
    members: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        index, _, tensor_name = name.partition(".")
        if not index.isdecimal() or int(index) >= count:
            raise ValueError(f"{name} belongs to none of its {count} members")
        members[int(index)][tensor_name] = tensor
    conversions = structure.get("conversions") or [None] * count
    return members, check_list_field(conversions, (dict, type(None)), "conversions")


def _parse_calibration(structure: Mapping[str, Any]) -> Calibration:
    """Read the calibration; files of earlier versions have only the paper's threshold."""
    value = structure.get("calibration")
    if value is None:
        threshold = structure.get("threshold")
        value = Calibration(threshold=threshold, paper_threshold=threshold).to_json()
    return Calibration.from_json(value)


def _build_base(path: Path, structure: Mapping[str, Any], trust_code: bool, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build the base network; one of the zoo on the meta device, unless it has buffers that the file lacks."""
    model_entry = structure.get("model")

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return build_from_json(path, model_entry, trust_code, tensors=len(tensors))

    if isinstance(model_entry, Mapping) and ":" in str(
        model_entry.get("name")
    ):  # code that may compute with the tensors it makes
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
    members, layers = (
        check_field(arguments["members"], int, "members"),
        check_list_field(arguments["layers"], str, "layers"),
    )
    check_field(arguments.get("seed", 0), int, "seed")
    if not len(set(layers)) == len(layers) <= len(tensors) or members > MAX_SAMPLES:
        raise ValueError(f"it is converted to {members} members in {len(layers)} layers, which its tensors do not have")
    return rebuild(base, arguments, tensors)


def _per_member(structure: Mapping[str, Any], name: str) -> list[dict[str, Any] | None]:
    """Return a list of a file that has an object or None for each member; files of earlier versions lack it."""
    values = structure.get(name) or [None] * structure["members"]
    check_list_field(values, (dict, type(None)), name)
    if len(values) != structure["members"]:
        raise ValueError(f"it has {len(values)} {name} for {structure['members']} members")
    return values


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

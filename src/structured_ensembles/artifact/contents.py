"""Contents: what the file of an ensemble keeps besides weights, as the JSON of the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from structured_ensembles.calibration import Calibration
from structured_ensembles.common.checks import check_choice
from structured_ensembles.data.assembly import Task
from structured_ensembles.data.kinds import Kinds, Normalizations, normalization_from_json
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.networks.graph_network import GraphNetwork
from structured_ensembles.networks.provenance import distinct_bases
from structured_ensembles.networks.resizing import size_attributes
from structured_ensembles.selection import Subnet
from structured_ensembles.storage.container import check_field, check_leaves, check_list_field, origin_to_json
from structured_ensembles.storage.weight_encoding import Storage

# A file is written in the lowest version that can hold it, so that earlier releases can read it: 6 with networks that
# were cut in their graph, or that have grouped convolutions; 5 with Gaussian heads;
# 4 with a calibration, several inputs or normalised columns; 3 with units; 2 with conversions; else 1.
VERSION = 6


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


def to_structure(contents: Contents, dtype: Storage) -> tuple[int, dict[str, Any]]:
    """Describe an ensemble as JSON values; return the lowest version of the format that can hold it, and the values.

    dtype: how weights are stored.
    """
    normalization = contents.normalization
    structure: dict[str, Any] = {
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
    for needed, name, value in _later_fields(contents):
        version, structure[name] = max(version, needed), value
    if normalization is not None and contents.input_kinds is None and not _is_image(contents.input_shape):
        version = max(version, 4)  # earlier versions would take columns for channels of images
    return version, structure


def _later_fields(contents: Contents) -> Iterator[tuple[int, str, Any]]:
    """Yield the fields that only some ensembles need: the version that introduced each, its name and its value."""
    conversions = [getattr(network, "conversion", None) for network in contents.networks]
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


def parse_attributes(structure: Mapping[str, Any]) -> dict[str, Any]:
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


def parse_calibration(structure: Mapping[str, Any]) -> Calibration:
    """Read the calibration; files of earlier versions have only the paper's threshold."""
    value = structure.get("calibration")
    if value is None:
        threshold = structure.get("threshold")
        value = Calibration(threshold=threshold, paper_threshold=threshold).to_json()
    return Calibration.from_json(value)


def _check_nested(value: Any, leaf_type: type, name: str) -> Any:
    """Return a list, dict or None whose leaves are of this type; raise an error if it is anything else."""
    return check_leaves(check_field(value, (list, dict, type(None)), name), leaf_type, name)

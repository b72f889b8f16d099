"""One file for an ensemble: a safetensors file with the members' weights and the JSON that rebuilds their structure.

No pickle, no code. The JSON says how to make the base network (a name of the zoo, or `package.module:function`, which
is imported only if the caller trusts it); a member is the base network with the shapes that its weights have in the
file. A network that stands for several members says how the base network is converted to it. A checksum over the JSON
and every tensor makes sure that a damaged file is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.calibration import Calibration
from structured_ensembles.container import ArtifactError, build_named, named_network, read_container, write_container
from structured_ensembles.copying import copy_with, tensors_of
from structured_ensembles.data.kinds import normalization_from_json
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.mc_dropout import DropoutNetwork
from structured_ensembles.origin import check_shapes, distinct_bases, read_bases, restore_base, warn_if_unnamed
from structured_ensembles.selection import Subnet
from structured_ensembles.shrinking import set_sizes
from structured_ensembles.units import Units

FORMAT = "structured-ensembles"
# 5 for files with Gaussian heads; 4 with a calibration, of several inputs or with normalised columns; 3 with units, 2
# with conversions; others are written as 1, which earlier versions read.
VERSION = 5
CONVERSIONS: dict[str, Callable[..., nn.Module]] = {
    "batch_ensemble": BatchEnsembleNetwork,
    "mc_dropout": DropoutNetwork,
}
Storage = Literal["float32", "float16", "int8"]
SCALE = "#scale"  # suffix of the scales of a tensor stored as int8


def save(ensemble: Ensemble, path: str | Path, dtype: Storage = "float32") -> int:
    """Write the ensemble; returns the size of the file in bytes.

    dtype: how weights are stored. "float16" halves the file; "int8" quarters it, with one scale per output channel.
        Vectors (biases, normalisation, rank-one factors) stay as they are. On loading they become float32 again;
        `evaluate` shows what it cost.
    """
    if dtype not in get_args(Storage):
        raise ValueError(f"dtype must be one of {', '.join(get_args(Storage))}, not {dtype!r}")
    warn_if_unnamed(ensemble.members[0], "model")
    tensors: dict[str, Tensor] = {}
    for index, network in enumerate(ensemble.members):
        vectors = getattr(network, "member_vectors", ())
        for name, tensor in _all_tensors(network).items():
            tensors |= _stored(f"{index}.{name}", tensor.detach().cpu(), "float32" if name in vectors else dtype)
    conversions = [getattr(network, "conversion", None) for network in ensemble.members]
    normalization = ensemble.normalization
    structure = {
        "members": len(ensemble.members),
        "model": named_network(ensemble.members[0]),
        "task": ensemble.task,
        "classes": list(ensemble.classes),
        "normalization": None if normalization is None else normalization.to_json(),
        "threshold": ensemble.threshold,
        "pixels": ensemble.pixels,
        "input_shape": ensemble.input_shape,  # of several inputs, a list or object of shapes
        "ids": ensemble.ids,
        "id_limit": ensemble.id_limit,
        "target_shape": ensemble.target_shape,
        "subnets": None if ensemble.subnets is None else [json.loads(net.to_json()) for net in ensemble.subnets],
        "base_shapes": distinct_bases(ensemble.members),
        "storage": dtype,
        "torch": torch.__version__,
    }
    version = 1
    if any(conversions):
        version, structure["conversions"] = 2, conversions
    if ensemble.units is not None:
        version, structure["units"] = 3, ensemble.units.to_json()
    if ensemble.calibration.fitted:
        version, structure["calibration"] = 4, ensemble.calibration.to_json()
    if ensemble.input_kinds is not None:
        version, structure["input_kinds"] = 4, ensemble.input_kinds
    elif normalization is not None and ensemble.input_shape is not None and len(ensemble.input_shape) != 3:
        version = 4  # earlier versions would take columns for channels of images
    if ensemble.gaussian:
        version, structure["gaussian"] = 5, True
    return write_container(path, FORMAT, version, structure, tensors)


def load(path: str | Path, model: nn.Module | None = None, trust_code: bool = False) -> Ensemble:
    """Read an ensemble, in evaluation mode, on the CPU.

    model: a base network such as the members were cut out of or converted from, or a member itself, if the file does
        not name one of the zoo; it is not changed.
    trust_code: let the file name a function of an installed package that makes the base network, and call it.
    """
    path = Path(path)
    structure, stored = read_container(path, FORMAT, VERSION, "an ensemble")
    tensors = _restored(stored)
    calibration = _calibration(path, structure)
    base = model if model is not None else _base(path, structure, trust_code)
    try:
        subnets, moments = structure["subnets"], structure["normalization"]
        conversions = structure.get("conversions") or [None] * structure["members"]
        converted = [_converted(base, conversion) for conversion in conversions]
        own = [_of_member(tensors, index) for index in range(structure["members"])]
        networks = [_member(network, given) for network, given in zip(converted, own, strict=True)]
        bases = read_bases(structure.get("base_shapes"))
        for network, source in zip(networks, converted, strict=True):
            if model is not None:
                check_shapes(source, own, bases)
            restore_base(network, source, bases)
        ensemble = Ensemble(
            networks,
            subnets=None if subnets is None else [Subnet.from_json(json.dumps(subnet)) for subnet in subnets],
            classes=structure["classes"],
            task=structure["task"],
            normalization=normalization_from_json(moments),
            units=Units.from_json(structure.get("units")),
            gaussian=structure.get("gaussian", False),
        )
        ensemble.calibration = calibration
        ensemble.ids, ensemble.id_limit = structure.get("ids", False), _tuples(structure.get("id_limit"))
        ensemble.pixels = bool(structure.get("pixels", False))  # files of earlier versions do not say
        ensemble.input_shape = _tuples(structure["input_shape"])
        ensemble.input_kinds = _tuples(structure.get("input_kinds"))
        ensemble.target_shape = _tuples(structure.get("target_shape"))  # files of earlier versions do not have it
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path} does not fit the base network: {error}") from error
    return ensemble.eval()


def _tuples(value: Any) -> Any:
    """Turn the lists of a JSON value back into tuples, also inside dicts."""
    if isinstance(value, dict):
        return {name: _tuples(own) for name, own in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _calibration(path: Path, structure: Mapping[str, Any]) -> Calibration:
    """Read the calibration; files of earlier versions have only a threshold, the paper's."""
    value = structure.get("calibration")
    if value is None:
        threshold = structure.get("threshold")
        value = Calibration(threshold=threshold, paper_threshold=threshold).to_json()
    try:
        return Calibration.from_json(value)
    except ValueError as error:
        raise ArtifactError(f"{path} has an invalid calibration: {error}") from error


def _base(path: Path, structure: Mapping[str, Any], trust_code: bool) -> nn.Module:
    named = structure["model"]
    if named is not None and ":" in named["name"]:  # code that may compute with what it makes: no meta tensors for it
        with torch.random.fork_rng(devices=[]):
            return build_named(path, named, trust_code)
    with torch.device("meta"):  # only its structure is needed
        return build_named(path, named, trust_code)


def _converted(base: nn.Module, conversion: Mapping[str, Any] | None) -> nn.Module:
    """What a conversion makes of the base network; the base network itself if it is that already."""
    if conversion is None or getattr(base, "conversion", None) == conversion:
        return base
    arguments = dict(conversion)
    method = arguments.pop("method")
    if method not in CONVERSIONS:
        raise ValueError(f"it is converted by {method!r}, which this version does not know")
    return CONVERSIONS[method](base, **arguments)


def _member(base: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `base` with these tensors in it, whatever their sizes."""
    expected = {name: tensor.dim() for name, tensor in _all_tensors(base).items()}
    found = {name: tensor.dim() for name, tensor in tensors.items()}
    unsaved = expected.keys() - base.state_dict().keys() - found.keys()  # files of earlier versions lack such buffers
    for name in unsaved:
        del expected[name]
    if expected != found:
        differing = sorted(set(expected.items()) ^ set(found.items()))[0][0]
        raise ValueError(f"{differing} is not in both")

    def replace(name: str, tensor: Tensor) -> Tensor:
        return tensors[name] if name in tensors else tensor.clone()

    network = copy_with(base, replace, replace)
    for module in network.modules():
        set_sizes(module)
    return network


def _all_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Its state, and the buffers that are no part of it, which may be as wide as the network."""
    state = tensors_of(network)
    return state | {name: buffer for name, buffer in network.named_buffers() if name not in state}


def _of_member(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _stored(name: str, tensor: Tensor, dtype: Storage) -> dict[str, Tensor]:
    if not tensor.is_floating_point() or tensor.dim() < 2 or dtype == "float32":
        return {name: tensor.clone()}
    if dtype == "float16":
        half = tensor.half()
        return {name: half if bool(half.isfinite().all()) else tensor.float()}
    if not bool(tensor.isfinite().all()):  # such as a mask of -inf, which has no steps
        return {name: tensor.clone()}
    scale = tensor.float().flatten(1).abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    steps = (tensor.float() / scale.view(-1, *[1] * (tensor.dim() - 1))).round().clamp(-127, 127)
    return {name: steps.to(torch.int8), name + SCALE: scale}


def _restored(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the type of the vectors, which are stored as they are."""
    vectors = {own.dtype for name, own in stored.items() if own.dim() == 1 and not name.endswith(SCALE)}
    floats = [dtype for dtype in vectors if dtype.is_floating_point]
    exact = floats[0] if len(floats) == 1 else torch.float32
    restored = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            continue
        if name + SCALE in stored:
            scale = stored[name + SCALE].view(-1, *[1] * (tensor.dim() - 1))
            restored[name] = (tensor.float() * scale).to(exact)
        else:
            restored[name] = tensor.to(exact) if tensor.dtype == torch.float16 else tensor
    return restored

"""The file of an ensemble: a safetensors file with the members' weights and the JSON that rebuilds their structure.

No pickle, no code. The JSON names the base network (one of the zoo, or `package.module:function`, which is imported
only if the caller trusts it); a member is the base network with the shapes that its weights have in the file. For a
network that stands for several members, the JSON says how the base network is converted to it. A checksum over the JSON
and every tensor reveals a damaged file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import torch
from torch import Tensor, nn

from structured_ensembles.artifact.contents import VERSION, Contents, parse_attributes, parse_calibration, to_structure
from structured_ensembles.artifact.members import MAX_SAMPLES, build_base, rebuild_members, split_by_member
from structured_ensembles.calibration.conformal import ConformalIntervals
from structured_ensembles.common.checks import check_path, check_type
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.networks.copying import copy_with
from structured_ensembles.networks.provenance import warn_if_unnamed
from structured_ensembles.networks.state import all_tensors
from structured_ensembles.storage.container import (
    check_field,
    check_leaves,
    raise_as_artifact_error,
    read_container,
    write_container,
)
from structured_ensembles.storage.weight_encoding import Storage, decode_tensors, encode_tensor
from structured_ensembles.tracing.walk import LAYERS

FORMAT = "structured-ensembles"
LARGEST_INPUT = 2**40  # values; no such tensor is allocated, but torch must be able to count its elements
Built = TypeVar("Built", bound=nn.Module)


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
    for network in contents.networks:
        samples = (getattr(network, "conversion", None) or {"members": 0})["members"]
        if samples > MAX_SAMPLES:
            raise ValueError(f"a network may stand for at most {MAX_SAMPLES} members to be loaded again, not {samples}")
    version, structure = to_structure(contents, dtype)
    return write_container(path, FORMAT, version, structure, tensors)


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
        calibration = parse_calibration(structure)
    with raise_as_artifact_error(f"{path} is not an ensemble that this version can read"):
        for name in ("storage", "torch"):
            check_field(structure.get(name, ""), str, name)
        check_leaves(structure.get("threshold"), (int, float), "threshold")
        tensors = decode_tensors(stored)
        of_members = split_by_member(structure, tensors)
    base = model if model is not None else build_base(path, structure, trust_code, tensors)
    with raise_as_artifact_error(f"{path} does not fit the base network"):
        networks = rebuild_members(base, structure, of_members, check_base=model is not None)
        contents = Contents(networks, calibration=calibration, **parse_attributes(structure))
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

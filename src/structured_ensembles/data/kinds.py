"""Kinds of input, told by the dtype (pixels, whole numbers, masks, floats), and the normalisation of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, map_inputs
from structured_ensembles.data.normalization import Choice, Normalization, normalization_for

Kind = Literal["pixels", "whole numbers", "mask", "floats"]
Kinds = tuple[Kind, ...] | dict[str, Kind]


def kind_of(tensor: Tensor, ids: bool = False) -> Kind:
    """Return the kind of a tensor by its dtype. ids: uint8 are whole numbers, not pixels."""
    if tensor.dtype == torch.bool:
        return "mask"
    if tensor.is_floating_point():
        return "floats"
    return "pixels" if tensor.dtype == torch.uint8 and not ids else "whole numbers"


def kinds_of(inputs: Inputs, ids: bool = False) -> Kinds | None:
    """Return the kind of each of several inputs; None for a single input."""
    return None if isinstance(inputs, Tensor) else map_inputs(partial(kind_of, ids=ids), inputs)


def cast_for_storage(tensor: Tensor, ids: bool = False) -> Tensor:
    """Cast one of several inputs for storage: whole numbers to int64, floats to float32; pixels and masks stay."""
    kind = kind_of(tensor, ids)
    return tensor.long() if kind == "whole numbers" else tensor.float() if kind == "floats" else tensor


@dataclass(frozen=True)
class Normalizations:
    """A normalisation, or none, for each of several inputs."""

    by_input: tuple[Normalization | None, ...] | dict[str, Normalization | None]

    def to_json(self) -> dict[str, Any]:
        """Encode as a dict for JSON."""
        return {"several": map_inputs(lambda one: None if one is None else one.to_json(), self.by_input)}


def normalization_from_json(value: Any) -> Normalization | Normalizations | None:
    """Restore a normalisation, of one input or of several, from its `to_json`; None stays None."""
    if not isinstance(value, dict):
        return Normalization.from_json(value)
    by_input = value["several"]
    return Normalizations(
        map_inputs(Normalization.from_json, tuple(by_input) if isinstance(by_input, list) else by_input)
    )


def normalizations_for(
    choice: Choice, inputs: Any, ids: bool, rows: Tensor | None = None, standardize: bool = True
) -> Normalizations | None:
    """Resolve a choice for each of several inputs, see `normalization_for`; whole numbers and masks have none."""

    def resolve_one(tensor: Tensor, choice: Choice) -> Normalization | None:
        if kind_of(tensor, ids) in ("whole numbers", "mask"):
            return None
        if choice == "imagenet" and tensor.dim() != 4:
            return None
        return normalization_for(choice, tensor[:, None] if tensor.dim() == 1 else tensor, rows, standardize)

    normalizations = map_inputs(resolve_one, inputs, _choices(choice, inputs))
    return None if all(one is None for one in _by_name(normalizations).values()) else Normalizations(normalizations)


def _choices(choice: Choice, inputs: Any) -> Any:
    """Return the choice for each of several inputs."""
    if choice is None or isinstance(choice, str):
        return map_inputs(lambda _: choice, inputs)
    if isinstance(choice, dict) and isinstance(inputs, dict) and choice.keys() <= inputs.keys():
        return {name: choice.get(name, "auto") for name in inputs}
    if isinstance(choice, list) and isinstance(inputs, tuple) and len(choice) == len(inputs):
        return tuple(choice)
    names = ", ".join(map(repr, inputs)) if isinstance(inputs, dict) else ""
    alternative = f"a dict with a choice for any of {names}" if names else f"a list of {len(inputs)} choices"
    raise ValueError(
        f"normalization of several inputs must be a word, which is for all, or {alternative}, not {choice!r}"
    )


def normalization_of_each(normalization: Any, inputs: Any) -> Any:
    """Return the normalisation of each of several inputs; None where there is none."""
    if isinstance(normalization, Normalizations):
        return normalization.by_input
    return map_inputs(lambda _: None, inputs)


def _by_name(several: Any) -> dict[Any, Any]:
    """Return several values as a dict, by name or position."""
    return several if isinstance(several, dict) else dict(enumerate(several))

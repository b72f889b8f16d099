"""Data and network of an experiment, by their names; names from files are imported only for callers that trust them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_ensembles.common.checks import check_choice
from structured_ensembles.common.inputs import is_several
from structured_ensembles.data import Data, load_data
from structured_ensembles.data.sources import data_sets
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.storage.container import ArtifactError
from structured_ensembles.zoo.by_name import Trust, build_model, find_function, is_trusted


def read_data(dataset: str, root: Path | None, seed: int, limit: int | None = None, validation: bool = True) -> Data:
    """A data set that the caller names, or of `package.module:function`; with at most `limit` training samples.

    validation: False joins the validation samples to the training samples.
    For a name that was read from a file, see `run_data`.
    """
    if ":" in dataset:
        data = find_function("dataset", dataset, {})()
        if not isinstance(data, Data):
            raise TypeError(f"dataset {dataset} must give a Data, not a {type(data).__name__}")
    else:
        check_choice("dataset", dataset, list(data_sets()))  # load_data would speak of its own argument
        data = load_data(dataset, root, seed=seed)
    if not validation:
        data = _without_validation(data)
    if limit is None or limit >= len(data.train):
        return data
    if limit < 1 or not isinstance(data.train, TensorSplit):
        raise ValueError(f"limit must be at least 1, and the data in memory, not {limit!r}")
    return replace(data, train=replace(data.train, index=data.train.index[:limit]))


def _without_validation(data: Data) -> Data:
    train, validation = data.train, data.validation
    if validation is None:
        return data
    held_out = isinstance(train, TensorSplit) and isinstance(validation, TensorSplit)
    if not held_out or train.inputs is not validation.inputs:  # type: ignore[attr-defined]
        raise ValueError("validation=False needs data in memory whose validation samples were held out of the training")
    index = torch.cat([train.index, validation.index])  # type: ignore[attr-defined]
    return replace(data, train=replace(train, index=index), validation=None)  # type: ignore[type-var]


def run_data(folder: Path, config: Mapping[str, Any], root: Path | None, trust_code: Trust) -> Data:
    """The data of a run folder, whose configuration this is; refuses to import what the caller does not trust."""
    check_trust(folder, config, trust_code)
    return read_data(config["dataset"], root, config["seed"], config.get("limit"), config.get("validation", True))


def run_ensemble(folder: Path, config: Mapping[str, Any], data: Data, trust_code: Trust) -> Ensemble:
    """The ensemble of a run folder; refuses to import what the caller does not trust."""
    check_trust(folder, config, trust_code)
    path = folder / "ensemble.safetensors"
    if ":" in config["model"] and trust_code is not True:  # the caller named this function, and no other
        return Ensemble.load(path, model=base_network(config, data, trust_code))
    return Ensemble.load(path, trust_code=trust_code is True)


def check_trust(folder: Path, config: Mapping[str, Any], trust_code: Trust) -> None:
    """Raise an ArtifactError if data or network of a run folder are made by code that the caller does not trust."""
    kinds = [kind for kind in ("dataset", "model") if not is_trusted(config[kind], trust_code)]
    if kinds:
        wanted = [f"{config[kind]!r} for its {kind}" for kind in kinds]
        raise ArtifactError(
            f"{folder / 'config.yaml'} wants to import {' and '.join(wanted)}: if you trust that code and this folder, "
            "say so with --trust-code (trust_code=True in Python)"
        )


def fitting_arguments(model: str, data: Data, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that follow from the data, for a model of the zoo; a user's own function gets what it was given."""
    if ":" in model:
        return dict(given)
    shape = data.shape
    if is_several(shape):
        raise ValueError(f"model {model!r} of the zoo takes one input, but the data have several: give one of your own")
    fitting: dict[str, Any] = {"num_classes": data.num_classes or 1}
    if model == "mlp":
        fitting["in_features"] = math.prod(shape)
    else:
        fitting["in_channels"] = shape[0]
    return {**fitting, **given}


def base_network(config: Mapping[str, Any], data: Data, trust_code: Trust = False) -> nn.Module | None:
    """The network that the run started from, without its weights; None if only a stranger's code could make it."""
    name = config["model"]
    if not is_trusted(name, trust_code):
        return None
    arguments = fitting_arguments(name, data, config["model_arguments"])
    with torch.device("meta"):  # only its size is needed
        return build_model(name, **arguments)

"""Data, network and ensemble of an experiment, by name; code named in files is imported only if it is trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_ensembles.common.inputs import is_several
from structured_ensembles.data import Data, load_data
from structured_ensembles.data.sources import data_sets, is_folder
from structured_ensembles.data.splits import IndexedSplit
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.storage.container import ArtifactError
from structured_ensembles.zoo.by_name import Trust, build_model, find_function, is_trusted


def read_data(dataset: str, root: Path | None, seed: int, limit: int | None = None, validation: bool = True) -> Data:
    """Read a data set by name, `folder:PATH` or `package.module:function`, with at most `limit` training samples.

    validation: False joins the validation samples to the training samples.
    The caller vouches for the name; for one that was read from a file, see `load_run_data`.
    """
    if is_folder(dataset):
        data = load_data(dataset, seed=seed)
        if data.test is None:  # figures are measured there
            raise ValueError(
                f"{dataset} must have a folder test beside train, or a share for it as in folder:PATH?test=0.2"
            )
    elif ":" in dataset:
        data = find_function("dataset", dataset, {})()
        if not isinstance(data, Data):
            raise TypeError(f"dataset {dataset} must give a Data, not a {type(data).__name__}")
    else:
        check_dataset_name(dataset)
        data = load_data(dataset, root, seed=seed)
    if not validation:
        data = _join_validation(data)
    if limit is None or limit >= len(data.train):
        return data
    if limit < 1 or not isinstance(data.train, IndexedSplit):
        raise ValueError(f"limit must be at least 1, and not of a loader, not {limit!r} of {type(data.train).__name__}")
    return replace(data, train=_take_first(data.train, limit, data.task == "classification"))


def _take_first(train: IndexedSplit, limit: int, classes: bool) -> IndexedSplit:
    """Take the first `limit` samples; of classes, where these lack one, the first of each class in turn."""
    labels = train.targets[train.index]
    chosen = torch.arange(limit, device=labels.device)
    if classes and len(labels[chosen].unique()) < len(labels.unique()):  # such as samples sorted by class
        rank = torch.empty_like(labels)  # of every sample among those of its class
        for label in labels.unique():
            of_class = torch.nonzero(labels == label).flatten()
            rank[of_class] = torch.arange(len(of_class), device=labels.device)
        chosen = rank.argsort(stable=True)[:limit].sort().values
    return replace(train, index=train.index[chosen])  # type: ignore[type-var]


def check_dataset_name(dataset: str) -> None:
    """Raise a ValueError unless `dataset` names one of ours, a folder, or a function."""
    if ":" not in dataset and dataset not in data_sets():  # load_data's message would name another argument
        raise ValueError(
            f"dataset must be one of {', '.join(map(repr, data_sets()))}, folder:PATH (a folder of pictures for each "
            f"class), or package.module:function that returns a Data, not {dataset!r}"
        )


def _join_validation(data: Data) -> Data:
    """Join the validation samples to the training samples."""
    train, validation = data.train, data.validation
    if validation is None:
        return data
    held_out = isinstance(train, IndexedSplit) and isinstance(validation, IndexedSplit)
    if not held_out or train.inputs is not validation.inputs:  # type: ignore[attr-defined]
        raise ValueError("validation=False needs data whose validation samples were held out of the training")
    index = torch.cat([train.index, validation.index])  # type: ignore[attr-defined]
    return replace(data, train=replace(train, index=index), validation=None)  # type: ignore[type-var]


def load_run_data(folder: Path, config: Mapping[str, Any], root: Path | None, trust_code: Trust) -> Data:
    """Read the data of a run folder with this configuration; refuse code that the caller does not trust."""
    check_trust(folder, config, trust_code)
    return read_data(config["dataset"], root, config["seed"], config.get("limit"), config.get("validation", True))


def load_run_ensemble(folder: Path, config: Mapping[str, Any], data: Data | None, trust_code: Trust) -> Ensemble:
    """Load the ensemble of a run folder; refuse code that the caller does not trust.

    data: those of the run, by which the network of a function is made that the caller trusts by its name.
    """
    check_trust(folder, config, trust_code)
    path = folder / "ensemble.safetensors"
    if not path.exists():
        kind = "is a run of sens continual" if "tasks" in config else "is not done yet, or its file is lost"
        raise ValueError(f"{folder} must be a finished run of sens train: it has no {path.name}, as it {kind}")
    if ":" in config["model"] and trust_code is not True:  # the caller named this function, and no other
        assert data is not None
        return Ensemble.load(path, model=build_base_network(config, data, trust_code))
    return Ensemble.load(path, trust_code=trust_code is True)


def check_trust(folder: Path, config: Mapping[str, Any], trust_code: Trust) -> None:
    """Raise an ArtifactError if a run folder names code for data or network that the caller does not trust."""
    names = {argument: config[argument] for argument in ("dataset", "model")}
    if is_folder(names["dataset"]):
        del names["dataset"]  # pictures, no code
    untrusted = [argument for argument, name in names.items() if not is_trusted(name, trust_code)]
    if untrusted:
        imports = [f"{config[argument]!r} for its {argument}" for argument in untrusted]
        raise ArtifactError(
            f"{folder / 'config.yaml'} asks to import {' and '.join(imports)}: if you trust that code and this folder, "
            "say so with --trust-code (trust_code=True in Python)"
        )


def add_data_arguments(model: str, data: Data, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add the arguments that follow from the data for a model of the zoo; a user's function gets `arguments` only."""
    if ":" in model:
        return dict(arguments)
    shape = data.shape
    if is_several(shape):
        raise ValueError(
            f"model {model!r} of the zoo takes one input, but the data have several: name a function of yours"
        )
    fitting: dict[str, Any] = {"num_classes": data.num_classes or 1}
    if model == "mlp":
        fitting["in_features"] = math.prod(shape)
    else:
        fitting["in_channels"] = shape[0]
    return {**fitting, **arguments}


def build_base_network(config: Mapping[str, Any], data: Data, trust_code: Trust = False) -> nn.Module | None:
    """Build the network that the run started from, without its weights; None if its code is not trusted."""
    name = config["model"]
    if not is_trusted(name, trust_code):
        return None
    arguments = add_data_arguments(name, data, config["model_arguments"])
    with torch.device("meta"):  # only its size is needed
        return build_model(name, **arguments)

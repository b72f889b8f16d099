"""Execution: settings of how training is computed; the recipe is the procedure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from structured_ensembles.common.checks import check_choice, check_flags, check_whole, convert_fields
from structured_ensembles.common.precision import Precision, resolve_precision

EngineName = Literal["auto", "loop", "graph"]


@dataclass(frozen=True)
class Execution:
    """Settings of how to compute the training that a `Recipe` describes.

    The precision is part of a run's identity, since it changes the weights beyond rounding: a folder or checkpoint of
    another precision is refused. Engine, streams and compile are not, so that a run may go on with others, such as on
    another machine or with less memory. The command line compares all four, as it does with every option.

    Args:
        engine: "loop" trains the members one by one; "graph" captures a step of all of them in one CUDA graph; "auto"
            takes the graph on a GPU. Results differ by rounding and by the draws of dropout.
        precision: what forward and backward passes compute in; weights are float32. "auto" is bfloat16 on a GPU that
            has it, float32 elsewhere.
        streams: how many members the graph runs at the same time, each with activations in memory; None: all of them,
            or as many as the GPU has memory for. With 1 it needs about the memory of the loop.
        compile: in the graph, run networks through torch.compile: some seconds more at the start. It pays for networks
            with many small operations and without batch norm, for which we have kernels. The loop ignores it.

    """

    engine: EngineName = "auto"
    precision: Precision = "auto"
    streams: int | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        convert_fields(self)
        check_choice("engine", self.engine, get_args(EngineName))
        check_choice("precision", self.precision, get_args(Precision))
        check_whole("streams", self.streams, or_none=True)
        check_flags(compile=self.compile)

    def precision_on(self, device: torch.device) -> Literal["float32", "bfloat16"]:
        """Return the precision of forward and backward passes on a device: what "auto" means there."""
        return resolve_precision(self.precision, device)

    def identity(self) -> dict[str, Any]:
        """Return the fields that are part of a run's identity."""
        return {"precision": self.precision}

    def changes(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, by name."""
        return asdict(self)


FIELDS = tuple(field.name for field in fields(Execution))


def execution_or_default(execution: Execution | None) -> Execution:
    """Return a checked execution; the default one for None."""
    if execution is not None and not isinstance(execution, Execution):
        raise TypeError(f"execution must be an Execution, such as Execution(precision='float32'), not {execution!r}")
    return execution or Execution()


def check_moved(names: Collection[str]) -> None:
    """Raise a TypeError if any name of a recipe's settings has moved to `Execution`."""
    moved = [name for name in FIELDS if name in names]
    if moved:
        settings = ", ".join(f"{name}=…" for name in moved)
        raise TypeError(
            f"{' and '.join(moved)} moved to Execution({settings}): give execution=Execution({settings}) beside the "
            f"recipe, or {' '.join(f'--execution.{name}' for name in moved)} on the command line"
        )


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a recipe's settings from before there was an `Execution` into those of the recipe and of the execution."""
    return (
        {name: value for name, value in settings.items() if name not in FIELDS},
        {name: value for name, value in settings.items() if name in FIELDS},
    )


def split_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Move the execution's settings of an old configuration from its "changes" to its "execution".

    A configuration of today comes back as it is.
    """
    changes, moved = split_settings(config["changes"]) if isinstance(config.get("changes"), Mapping) else ({}, {})
    if not moved:
        return dict(config)
    execution = config.get("execution")
    return {
        **config,
        "changes": changes,
        "execution": {**moved, **(execution if isinstance(execution, Mapping) else {})},
    }

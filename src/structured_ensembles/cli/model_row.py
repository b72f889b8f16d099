"""`sens models --check`: the user's model, an example of its inputs, and the row that tells whether it can be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from structured_ensembles.checking.comparison import Difference
from structured_ensembles.checking.model_check import ModelCheck
from structured_ensembles.common.tables import text_table
from structured_ensembles.zoo.by_name import build_model, check_accepted, find_model, torchvision_hint

REASONS = 5  # at most so many reasons are printed


def make_model_and_example(
    name: str, shape: Sequence[int] | None, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    """Make the model of a name, and an example: the function's own, or two inputs (2, *shape) of random numbers."""
    if shape is not None and (not shape or min(shape) < 1):
        raise ValueError(f"--shape must be positive numbers, such as 3 224 224, not {shape}")
    made = _call(name, find_model(name), arguments) if ":" in name else build_model(name, **arguments)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"--check {name} must return a torch.nn.Module, or a pair of one and an example, "
            f"not a {type(made).__name__}"
        )
    if shape is None:
        raise ValueError(
            f"--check {name} needs an example of its inputs: give --shape, such as --shape 3 224 224, or let the "
            "function return a pair (model, example)"
        )
    return made, torch.randn(2, *shape)


def _call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call the user's function; it may import a library that needs a torchvision which fits torch."""
    check_accepted(name, function, arguments)
    try:
        return function(**arguments)
    except (ImportError, RuntimeError) as error:
        if hint := torchvision_hint(error):
            raise ValueError(f"--check {name} cannot import a library that it needs: {error}{hint}") from error
        raise


def format_check(check: ModelCheck) -> str:
    """Write the row of a check, and below it why groups are fixed or the model cannot be traced."""
    if check.error is not None and not check.groups:
        return f"The model cannot be traced: {check.error}"
    memory = "–" if check.peak_megabytes is None else f"{check.peak_megabytes:.0f}"
    row = (
        f"{check.seconds:.1f}",
        memory,
        f"{check.prunable}/{check.groups}",
        f"{check.parameters:,}",
        f"{check.left:,}",
        " and ".join(check.ways) or "nothing",
        _format_mode(check.evaluation),
        "random" if check.random else _format_mode(check.training),
    )
    header = ("seconds", "peak MB", "groups", "parameters", "left", "cut", "evaluation", "training")
    lines = [text_table(header, [row]), "", _verdict(check)]
    listed = list(check.reasons.items())
    lines += [f"  {count} fixed: {reason}" for reason, count in listed[:REASONS]]
    if len(listed) > REASONS:
        others = sum(count for _, count in listed[REASONS:])
        lines.append(f"  {others} more for other reasons: print(trace(model, example)) shows them")
    return "\n".join(lines)


def _verdict(check: ModelCheck) -> str:
    """Say in a sentence whether the cut is exact."""
    if check.error is not None:
        return f"The cut could not be compared: {check.error}"
    if not check.cut:
        return "Nothing can be cut."
    if check.exact:
        return "The cut is exact: the network without these channels computes what the full one computes without them."
    return "The cut is not exact. That is a mistake of this library; please report the model."


def _format_mode(difference: Difference | None) -> str:
    """Write the difference in one mode."""
    if difference is None:
        return "–"
    return f"{'exact' if difference.exact else 'differs'} ({difference.relative:.0e})"

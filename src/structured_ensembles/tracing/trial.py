"""The proof: run the model's own code on fewer channels and see that it does what the layouts predict.

The exported graph shows the operations, not the Python code behind them. `x.view(-1, 512)` and `x.flatten(1)` export
alike, but only one of them survives the removal of a channel. So the model is shrunk (fake tensors, no memory),
exported
once more, and compared: the same operations, the predicted shapes, no other argument changed. Whatever differs fixes
the channels it touches, until the trial holds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from structured_ensembles.tracing.layout import (
    ChannelSet,
    Layout,
    Value,
    channel_sets,
    extent,
    kept_extent,
)
from structured_ensembles.tracing.walk import Step, Walk

ASSUMES = "the model's code relies on its size"


def trial_counts(candidates: list[ChannelSet]) -> dict[ChannelSet, int]:
    """How many channels of each set the trial keeps: fewer than all, and as different from each other as possible."""
    return {channels: max(1, channels.size - 1 - index % 11) for index, channels in enumerate(candidates)}


def first_difference(steps: list[Step], trial: list[Step], counts: dict[ChannelSet, int]) -> Step | None:
    """The first operation that the trial did otherwise than predicted."""

    def size(layout: Layout) -> int:
        return kept_extent(layout, lambda channels: counts.get(channels, channels.size))

    for predicted, found in zip(steps, trial, strict=False):
        if not _as_predicted(predicted, found, size):
            return predicted
    return None if len(steps) == len(trial) else steps[min(len(steps), len(trial)) - 1]


def _as_predicted(predicted: Step, found: Step, size: Callable[[Layout], int]) -> bool:
    if (predicted.name, predicted.module) != (found.name, found.module):
        return False
    for before, after in zip(predicted.results, found.results, strict=True):
        if (before is None) != (after is None):
            return False
        if before is not None and after is not None and tuple(map(size, before.dims)) != after.shape:
            return False
    for name, argument in predicted.arguments.items():
        if name in predicted.expected:
            expected = predicted.expected[name]
            if expected is not None and expected(size) != _plainly(found.arguments[name]):
                return False
        elif _constants(argument) != _constants(found.arguments[name]):
            return False
    return True


def _plainly(argument: Any) -> Any:
    return list(argument) if isinstance(argument, list | tuple) else argument


def _constants(argument: Any) -> str:
    """An argument without its tensors, whose shapes are compared where they are computed."""
    if isinstance(argument, list | tuple):
        return str([_constants(item) for item in argument])
    return "tensor" if isinstance(argument, Value | Tensor) else str(argument)


def blame_step(walk: Walk, step: Step, candidates: list[ChannelSet]) -> None:
    """Fix the candidates that the operation touches."""
    layouts = [dim for value in step.values for dim in value.dims]
    layouts += [dim for value in step.results if value is not None for dim in value.dims]
    if not _fix_candidates(layouts, candidates, f"{ASSUMES}: {step.name} in {step.module or 'the model'}"):
        blame_module(walk, step.module, candidates, f"{step.name} changes")


def blame_module(walk: Walk, module: str, candidates: list[ChannelSet], error: str) -> None:
    """Fix the candidates that the parameters below `module` touch; if there are none, those of its parent."""
    while True:
        prefix = f"{module}." if module else ""
        layouts = [dim for name, value in walk.parameters.items() if name.startswith(prefix) for dim in value.dims]
        where = module or "the model"
        if _fix_candidates(layouts, candidates, f"{ASSUMES}: {where} fails without some of it ({error})"):
            return
        assert module, "every candidate has a producer, so that the whole model touches one"
        module = module.rpartition(".")[0]


def _fix_candidates(layouts: list[Layout], candidates: list[ChannelSet], reason: str) -> bool:
    touched = {channels for layout in layouts if extent(layout) > 1 for channels in channel_sets(layout)}
    fixed = [channels for channels in candidates if channels in touched and not channels.fixed]
    for channels in fixed:
        channels.fixed = reason
    return bool(fixed)


@contextmanager
def running_module(model: nn.Module) -> Any:
    """Keeps the qualified name of the innermost module that is running; after an error, the one that failed."""
    stack: list[str] = [""]
    handles = []
    for name, module in model.named_modules():

        def enter(_module: nn.Module, _inputs: Any, name: str = name) -> None:
            stack.append(name)

        def leave(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()

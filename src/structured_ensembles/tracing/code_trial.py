"""A trial with exactly the numbers of channels that an extracted network will have.

`trace` tries the model's code with some numbers of channels. Code that branches on a size, as in `if width % 3 == 0`,
may do the same with those and something else with others. So `extract` tries the numbers that it is given, on fake
tensors, once for each choice of numbers: members that keep equally many channels of each group share one trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.exports import exclusive_export
from structured_ensembles.networks.resizing import resize
from structured_ensembles.tracing.fake_model import FakeModel
from structured_ensembles.tracing.grouping import axis_of
from structured_ensembles.tracing.layout import ChannelSet
from structured_ensembles.tracing.trial import Counts, differences
from structured_ensembles.tracing.walk import Step, Walk


def resize_followed(
    model: nn.Module, walk: Walk, names: Mapping[ChannelSet, str], numbers: Mapping[str, int]
) -> nn.Module:
    """Copy a fake model that was followed with `numbers[group]` channels of each group. names: of the channel sets."""
    axes = {name: tuple(axis_of(dim, names) for dim in value.dims) for name, value in walk.parameters.items()}
    attributes = {key: axis_of(layout, names) for key, layout in walk.attributes.items()}
    return resize(model, axes, numbers, attributes)


@dataclass(eq=False)
class CodeTrial:
    """Comparison of a model's code, run on any numbers of channels, with the prediction by the layouts.

    steps: the operations of the full model, in each mode in which it was followed. names: of the offered sets.
    """

    fake: FakeModel
    walk: Walk
    steps: Mapping[bool, list[Step]]
    names: Mapping[ChannelSet, str]
    known: dict[frozenset[tuple[str, int]], str | None] = field(default_factory=dict)

    @exclusive_export()
    def failure(self, numbers: Mapping[str, int]) -> str | None:
        """Say what the code does otherwise with `numbers[group]` channels of each group; None if it does the same."""
        choice = frozenset(numbers.items())
        if choice not in self.known:
            self.known[choice] = self._try(numbers)
        return self.known[choice]

    def _try(self, numbers: Mapping[str, int]) -> str | None:
        """Run the code with so many channels in each mode, and compare."""
        counts: Counts = {channels: numbers[name] for channels, name in self.names.items() if name in numbers}
        for training, steps in self.steps.items():
            small = resize_followed(self.fake.model, self.walk, self.names, numbers)
            try:
                trial = Walk(small).follow(self.fake.export(small, training))
            except Exception as error:  # the model's code may raise anything
                return f"it fails: {first_line(error)}"
            differing = differences(steps, trial, counts)
            if differing:
                step = differing[0].step
                where = step.module or "the model itself"
                return f"{step.name} in {where} is another operation, or of another size, than with all channels"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> CodeTrial:
        """Return the trial itself: it only remembers what it found."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a pickle, which cannot hold the model's code: extraction elsewhere makes no trial."""
        return type(None), ()

"""The trial: run the model's code on fewer channels and check that it does what the layouts predict.

The exported graph shows the operations, not the Python code behind them. `x.view(-1, 512)` and `x.flatten(1)` export
alike, but only the second still works after the removal of a channel. So the model is shrunk (fake tensors, no memory),
exported once more, and compared: the same operations, the predicted shapes, no other argument changed. An operation
that differs fixes the channels it touches, and the trial is repeated until nothing differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from structured_ensembles.tracing.layout import ChannelSet, Layout, Value, channel_sets, extent, is_fixed, kept_extent
from structured_ensembles.tracing.walk import Step, Walk

ASSUMES = "the model's code relies on its size"
HANDLES_SIZES = frozenset(
    [
        *("view", "reshape", "unflatten", "expand", "broadcast_to", "slice", "narrow", "split", "split_with_sizes"),
        *("pad", "constant_pad_nd", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"),
    ]
)
COPIES = frozenset(["contiguous"])  # exported only where memory must move, which depends on sizes; values stay the same
OF_MODE = frozenset(["train", "dropout_p"])  # arguments of recurrent layers and attention that the mode sets
Counts = dict[ChannelSet, int]
Size = Callable[[Layout], int]


def trial_counts(candidates: Sequence[ChannelSet], steps: Sequence[Step]) -> list[Counts]:
    """Choose how many channels of each set the trials keep: different numbers from 2 to all but one.

    Code that handles sizes may work by coincidence: half of 2 + 3 channels, rounded down, is 2. If there is such code,
    a second trial reverses the order among sets of equal size. If the range is too small for all of them to keep
    different numbers, a third trial changes which ones are equal. If code squeezes dimensions with channels, all sets
    keep a single one in another trial.
    """
    trials: list[Counts] = [{}, {}, {}]
    seen: dict[int, int] = {}
    repeated, handled = False, any(step.name in HANDLES_SIZES for step in steps)
    for channels in candidates:
        least = 2 if channels.size > 3 else 1
        choices = channels.size - least
        index = seen[channels.size] = seen.get(channels.size, -1) + 1
        repeated = repeated or index >= choices
        stride = next(step for step in range(max(1, choices // 3), choices + 2) if math.gcd(step, choices) == 1)
        first = index * stride % choices
        trials[0][channels] = least + first
        trials[1][channels] = least + choices - 1 - first if choices > 1 else least + 1 - index % 2
        trials[2][channels] = least + (index * stride + index // choices + choices // 2) % choices
    number = 1 if not handled or len(seen) == len(candidates) else 3 if repeated else 2
    single = [dict.fromkeys(candidates, 1)] if any(map(_squeezes_channels, steps)) else []
    return trials[:number] + single


def _squeezes_channels(step: Step) -> bool:
    """Tell whether an operation would take away a dimension of which a single channel is left."""
    result = step.results[0] if step.results else None
    return step.name in ("squeeze", "squeeze_") and result is not None and not all(map(is_fixed, result.dims))


def same_operations(steps: Sequence[Step], others: Sequence[Step]) -> bool:
    """Tell whether two graphs have the same operations and constants, apart from the mode of dropout and norms."""

    def describe(step: Step) -> tuple[str, ...]:
        mode = "dropout" in step.name or "norm" in step.name
        arguments = [] if mode else [value for name, value in step.arguments.items() if name not in OF_MODE]
        return step.name, step.module, _constants(arguments)

    return [describe(step) for step in steps if not _counts_batches(step)] == [
        describe(step) for step in others if not _counts_batches(step)
    ]


def _counts_batches(step: Step) -> bool:
    """Tell whether an operation advances the counter of a norm, as all do in training mode: a number, no channels."""
    counter = step.values[0].parameter if step.name == "add_" and step.values else None
    return counter is not None and counter.endswith("num_batches_tracked") and step.values[0].shape == ()


class Deviation(NamedTuple):
    """An operation that differs from the prediction although its inputs are as predicted; `tried` in its place."""

    step: Step
    tried: Step | None


def differences(steps: Sequence[Step], trial: Sequence[Step], counts: Counts) -> list[Deviation]:
    """List the operations that differ from the prediction although their inputs are as predicted."""
    steps = [step for step in steps if step.name not in COPIES]
    trial = [step for step in trial if step.name not in COPIES]
    sizes: dict[int, int] = {}  # by id of the layout: values share layouts, and some are long

    def size(layout: Layout) -> int:
        if id(layout) not in sizes:
            sizes[id(layout)] = kept_extent(layout, lambda channels: counts.get(channels, channels.size))
        return sizes[id(layout)]

    differing: list[Deviation] = []
    for predicted, tried in zip(steps, trial, strict=False):
        if (predicted.name, predicted.module, len(predicted.results)) != (tried.name, tried.module, len(tried.results)):
            return [*differing, Deviation(predicted, tried)]  # the steps after it cannot be compared
        if _shapes_hold(predicted.values, tried.values, size) and not _is_as_predicted(predicted, tried, size):
            differing.append(Deviation(predicted, tried))
    if len(steps) == len(trial) or differing:
        return differing
    return [Deviation(steps[min(len(steps), len(trial)) - 1], None)]


def _shapes_hold(predicted: Sequence[Value | None], tried: Sequence[Value | None], size: Size) -> bool:
    """Tell whether all tensors have the predicted shapes."""
    if len(predicted) != len(tried):
        return False
    pairs = zip(predicted, tried, strict=True)
    shapes = [(None if p is None else tuple(map(size, p.dims)), None if t is None else t.shape) for p, t in pairs]
    return all(expected == actual for expected, actual in shapes)


def _is_as_predicted(predicted: Step, tried: Step, size: Size) -> bool:
    """Tell whether the results and arguments of an operation are as predicted."""
    if not _shapes_hold(predicted.results, tried.results, size):
        return False
    for name, argument in predicted.arguments.items():
        if name in predicted.expected:
            expected = predicted.expected[name]
            if expected is not None and expected(size) != _as_list(tried.arguments.get(name)):
                return False
        elif _constants(argument) != _constants(tried.arguments.get(name)):
            return False
    return True


def _as_list(argument: Any) -> Any:
    """Convert a tuple to a list, so that the two compare as equal."""
    return list(argument) if isinstance(argument, list | tuple) else argument


def _constants(argument: Any) -> str:
    """Write out an argument without its tensors, whose shapes are compared where they are computed."""
    if isinstance(argument, list | tuple):
        return str([_constants(item) for item in argument])
    return "tensor" if isinstance(argument, Value | Tensor) else str(argument)


@dataclass(frozen=True)
class Blame:
    """Search for the channel sets to blame for a trial's failure, and a note on each why it stays.

    candidates: the sets that were cut. rewritable: whether the exported graph may be cut instead of the code; then the
        code's reliance on a set is only noted, and networks of many groups are searched less closely.
    """

    walk: Walk
    candidates: Sequence[ChannelSet]
    rewritable: bool

    def deviation(self, steps: Sequence[Step], deviation: Deviation, counts: Counts) -> None:
        """Blame the candidates whose size a constant is; or those that an operation touches, or its result meets first.

        counts: of the trial, in which sets keep different numbers of channels: they tell whose size a constant is.
        """
        step = deviation.step
        reason = f"{ASSUMES}: {step.name} in {step.module or 'the model'}"
        sizes = _number_of(step), _number_of(deviation.tried)
        if self._blame({channels for channels in counts if (channels.size, counts[channels]) == sizes}, reason):
            return
        involved, seen = [step], set[int]()
        while involved:
            if self._blame(sets_touched(involved), reason):
                return
            seen |= {id(other) for other in involved}
            results = {id(result) for other in involved for result in other.results if result is not None}
            readers = (other for other in steps if any(id(value) in results for value in other.values))
            involved = [reader for reader in readers if id(reader) not in seen]
        self.module(step.module, f"{step.name} changes")

    def module(self, module: str, error: str) -> None:
        """Blame the candidates that the parameters below a module touch; if there are none, those of its parent.

        Where the graph can be cut, modules of the same kind are blamed at once: they will fail alike.
        """
        while True:
            alike = {module}
            if self.rewritable and module:
                kind = type(self.walk.modules[module])
                alike |= {name for name, other in self.walk.modules.items() if type(other) is kind}
            reason = f"{ASSUMES}: {module or 'the model'} fails without some of it ({error})"
            prefixes = tuple(f"{name}." if name else "" for name in alike)
            parameters = self.walk.parameters.items()
            layouts = [dim for name, value in parameters if name.startswith(prefixes) for dim in value.dims]
            if self._blame(_sets_in(layouts), reason):
                return
            assert module, "every candidate has a producer, so that the whole model touches one"
            module = module.rpartition(".")[0]

    def sets(self, channel_sets: Sequence[ChannelSet], reason: str) -> None:
        """Blame these sets."""
        for channels in channel_sets:
            if self.rewritable:
                channels.in_code = channels.in_code or reason
            else:
                channels.fixed = channels.fixed or reason

    def _blame(self, touched: set[ChannelSet], reason: str) -> bool:
        """Blame the candidates among these sets; return whether there are any."""
        blamed = [channels for channels in self.candidates if channels in touched]
        self.sets(blamed, reason)
        return bool(blamed)


def _number_of(step: Step | None) -> Any:
    """Return the value of a small constant tensor; None for any other operation."""
    return step.arguments["value"] if step is not None and step.name == "constant" else None


def sets_touched(steps: Sequence[Step]) -> set[ChannelSet]:
    """Return the channel sets along the arguments and results of operations."""
    values = [value for step in steps for value in (*step.values, *step.results) if value is not None]
    return _sets_in([dim for value in values for dim in value.dims])


def _sets_in(layouts: Sequence[Layout]) -> set[ChannelSet]:
    """Return the channel sets of layouts."""
    return {channels for layout in layouts if extent(layout) > 1 for channels in channel_sets(layout)}


def find_failing(
    candidates: Sequence[ChannelSet], failure: Callable[[Sequence[ChannelSet]], str | None]
) -> list[ChannelSet]:
    """Find the sets that alone make the model fail if they lose channels, by bisection; none if only several do."""
    if failure(candidates) is None:
        return []
    if len(candidates) == 1:
        return list(candidates)
    middle = len(candidates) // 2
    return find_failing(candidates[:middle], failure) + find_failing(candidates[middle:], failure)


@contextmanager
def track_running_module(model: nn.Module) -> Any:
    """Yield the stack of the qualified names of running modules; after an error, the last one is that which failed."""
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

"""Find the channel sets that can be pruned: follow the model, then try what the layouts promise, until it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import call_arguments
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.networks.graph_network import bind_inputs
from structured_ensembles.tracing.code_trial import CodeTrial, resize_followed
from structured_ensembles.tracing.fake_model import FakeModel, reads_training_flag
from structured_ensembles.tracing.grouping import NamedSet, axis_of, name_sets
from structured_ensembles.tracing.layout import ChannelSet, extent, fix
from structured_ensembles.tracing.templates import (
    Template,
    TemplateError,
    check_other_samples,
    check_template,
    make_template,
)
from structured_ensembles.tracing.trial import (
    ASSUMES,
    Blame,
    Counts,
    differences,
    find_failing,
    same_operations,
    sets_touched,
    track_running_module,
    trial_counts,
)
from structured_ensembles.tracing.walk import Step, Walk

FEW_CANDIDATES = 12  # sets among which the ones that the code relies on are searched one by one


@dataclass
class Followed:
    """A model that was followed in one or both modes: its walk, and by mode the exported program and its steps.

    tried: the modes in which the code must be tried on fewer channels. graph_refused: whether the graph cannot be cut.
    """

    fake: FakeModel
    walk: Walk
    programs: dict[bool, ExportedProgram] = field(default_factory=dict)
    steps: dict[bool, list[Step]] = field(default_factory=dict)
    tried: list[bool] = field(default_factory=list)
    compared: set[bool] = field(default_factory=set)  # the modes in which a graph of more samples was compared
    graph_refused: bool = False

    def follow(self, training: bool) -> None:
        """Follow the model in one mode."""
        program = self.fake.export(self.fake.model, training)
        self.steps[training] = self.walk.follow(program)
        self.programs[training] = program

    def check_other_samples(self, training: bool) -> None:
        """Raise `TemplateError` if the graph of more samples has other constants; done once in each mode."""
        if training not in self.compared:
            try:
                other = self.fake.export(self.fake.model, training, more_samples=True)
            except Exception as error:  # the model's code may raise anything
                raise TemplateError(
                    f"its code takes only as many samples as the example: {first_line(error)}"
                ) from error
            samples = 0 if self.walk.batch is None else extent(self.walk.batch)
            check_other_samples(self.programs[training], other, self.steps[training], samples)
            self.compared.add(training)


@dataclass(frozen=True)
class Offers:
    """Result of `find_offers`: the channel sets that layers compute, names of the offered ones, and the templates."""

    walk: Walk
    sets: Sequence[NamedSet]
    templates: Mapping[bool, Template]
    doubled: bool = False  # whether the model was followed on the example twice
    code: Followed | None = None  # how the model was followed, if its code is cut

    @property
    def trial(self) -> CodeTrial | None:
        """Return the trial of the model's code with any numbers of channels, if the code is cut."""
        if self.code is None:
            return None
        return CodeTrial(self.code.fake, self.walk, self.code.steps, self.names)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the model's first output for the example."""
        shape = self.walk.output_shape or ()
        return (1, *shape[1:]) if self.doubled and shape[:1] == (2,) else shape

    @property
    def names(self) -> dict[ChannelSet, str]:
        """Return the names of the offered sets."""
        return {named.channels: named.name for named in self.sets if named.reason is None}


def find_offers(fake: FakeModel, coupled: bool, approximate: bool, nested: bool, graphs: bool) -> Offers:
    """Find the channel sets of a model, and those that can be pruned; the arguments are those of `trace`.

    If the model's code can lose all offered sets, it is cut. If not, and its exported graph can, that is. Otherwise
    what stands in the way is fixed, and the rest is tried again.
    """
    followed = _follow(fake)
    while True:
        offers = Offers(followed.walk, name_sets(followed.walk, coupled, approximate, nested), {}, fake.doubled)
        if _code_holds(followed, offers.names, graphs):
            return replace(offers, code=followed)
        if graphs:
            if True not in followed.steps:  # this may merge or fix sets
                _follow_training(followed)
                offers = replace(offers, sets=name_sets(followed.walk, coupled, approximate, nested))
            templates = _find_templates(followed, offers.names)
            if templates is not None:
                for channels in offers.names:
                    channels.in_code = channels.in_code or "other groups are cut in the graph"
                return replace(offers, templates=templates)
            graphs = not followed.graph_refused


def suggest_layout(example: Any, channels_missing: bool = False) -> str:
    """Suggest another layout, where an example looks like images with channels last or without, or like one image.

    channels_missing: whether the model's error was about the number of channels.
    """
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    if len(tensors) != 1:
        return ""
    shape, colours = tuple(tensors[0].shape), (1, 3, 4)
    if len(shape) == 4 and shape[1] not in colours and shape[3] in colours:
        return " (The channels of these images seem to come last: x.transpose(0, 3, 1, 2) of an array puts them first.)"
    if len(shape) == 3 and shape[0] in colours:
        return " (This seems to be one image: x[None] makes a batch of one.)"
    if len(shape) == 3 and channels_missing:
        return " (If these are images without channels, x[:, None] gives them one.)"
    return ""


def _follow(fake: FakeModel) -> Followed:
    """Follow the model in evaluation mode, and in training mode if it may differ."""
    followed = Followed(fake, Walk(fake.model))
    try:
        followed.follow(training=False)
    except Exception as error:
        hint = " (Token ids stay whole numbers in Data.from_arrays(…, ids=True).)" if "indices" in str(error) else ""
        if "data-dependent" in str(error):
            hint += " (Its code seems to branch on the values of a tensor, where a graph can branch on shapes only.)"
        if "not a known type" in str(error):  # torch's line ends in an invitation to write to its developers
            hint += " (Let it return a tensor, a tuple or a dict.)"
        if isinstance(fake.inputs, dict) and "argument" in str(error):
            hint += f" (Inputs in a dict reach it as keyword arguments: {', '.join(fake.inputs)}.)"
        hint += suggest_layout(fake.inputs, channels_missing="channels" in str(error))
        message = first_line(error).partition(" If this type")[0]
        raise ValueError(
            f"the model cannot be followed on an example of shape {fake.shapes}: either `example` is not what it "
            f"takes, or torch.export cannot follow its code. It says: {message}{hint}"
        ) from error
    followed.tried.append(False)
    unused = {name for name, _ in fake.model.named_parameters()} - followed.walk.used  # auxiliary heads, for example
    if unused or reads_training_flag(fake.model):
        _follow_training(followed)
        if True in followed.steps and (unused or not same_operations(followed.steps[False], followed.steps[True])):
            followed.tried.append(True)  # further layers or other code, which the trial must include
    return followed


def _follow_training(followed: Followed) -> None:
    """Follow the model in training mode; where that fails, all channels are fixed: it may do anything to them."""
    try:
        followed.follow(training=True)
    except Exception as error:
        for producer in followed.walk.producers:
            fix(producer.channels, f"the model cannot be followed in training mode ({first_line(error)})")


def _code_holds(followed: Followed, names: Mapping[ChannelSet, str], graphs: bool) -> bool:
    """Tell whether the model's code does what the layouts predict with fewer channels; if not, note which are to blame.

    graphs: whether the graph may be cut instead; then the sets that the code relies on are not fixed.
    """
    candidates = list(names)
    steps = [step for training in followed.tried for step in followed.steps[training]]
    trials = trial_counts(candidates, steps) if candidates else []
    return all(_trial_holds(followed, names, counts, Blame(followed.walk, candidates, graphs)) for counts in trials)


def _trial_holds(followed: Followed, names: Mapping[ChannelSet, str], counts: Counts, blame: Blame) -> bool:
    """Try the code with as many channels as `counts` says; if it fails, blame the sets that it relies on."""
    fake, candidates = followed.fake, blame.candidates

    def shrink(chosen: Iterable[ChannelSet]) -> nn.Module:
        numbers = {names[channels]: counts[channels] for channels in chosen}
        return resize_followed(fake.model, followed.walk, names, numbers)

    for training in followed.tried:
        small = shrink(candidates)
        with track_running_module(small) as running:
            try:
                trial = Walk(small).follow(fake.export(small, training))
            except Exception as error:  # the model's code may raise anything
                close = not blame.rewritable or len(candidates) <= FEW_CANDIDATES
                failing = find_failing(candidates, partial(_failure, fake, shrink, training)) if close else []
                blame.sets(failing, f"{ASSUMES}: {first_line(error)}")
                if not failing:
                    blame.module(running[-1], first_line(error))
                return False
        differing = differences(followed.steps[training], trial, counts)
        for deviation in differing:
            blame.deviation(followed.steps[training], deviation, counts)
        if differing:
            return False
    return True


def _failure(fake: FakeModel, shrink: Any, training: bool, chosen: Iterable[ChannelSet]) -> str | None:
    """Return the error of a model in which only the chosen sets have fewer channels; None if it runs."""
    return fake.failure(shrink(chosen), training)


def _find_templates(followed: Followed, names: Mapping[ChannelSet, str]) -> dict[bool, Template] | None:
    """Make the templates of both modes and try them; None if some set had to be fixed, or the graph cannot be cut."""
    templates = {}
    axis = partial(axis_of, names=names)
    try:
        for training, program in followed.programs.items():
            steps = followed.steps[training]
            if not training or not same_operations(followed.steps[False], steps):
                followed.check_other_samples(training)
            template, operation_steps = make_template(program, steps, axis, dtype_of(followed.fake.model))
            counts = trial_counts(list(names), steps)[0]
            numbers = {names[channels]: count for channels, count in counts.items()}
            small = resize_followed(followed.fake.model, followed.walk, names, numbers)
            with followed.fake.running(small, training, more_samples=True) as inputs:
                tensors = _bind_inputs(template, inputs)
                check_template(template, operation_steps, axis, small, tensors, numbers)
            templates[training] = template
    except TemplateError as error:
        _refuse_template(followed, error, list(names))
    return templates if len(templates) == 2 else None


def _bind_inputs(template: Template, inputs: Any) -> list[Tensor]:
    """Return the tensors among the inputs, in the order of the graph's."""
    try:
        return bind_inputs(template.graph, *call_arguments(inputs))
    except TypeError as error:
        raise TemplateError(f"its graph takes other inputs: {first_line(error)}") from error


def _refuse_template(followed: Followed, error: TemplateError, candidates: Sequence[ChannelSet]) -> None:
    """Fix the sets that a failing operation of a cut graph touches; if it touches none, no graph will be cut."""
    touched = sets_touched([error.step]) if error.step is not None else set()
    for channels in candidates:
        if channels in touched:
            channels.fixed = f"{channels.in_code or ASSUMES}; and in its graph, {error}"
        channels.in_code = None
    followed.graph_refused = not touched & set(candidates)

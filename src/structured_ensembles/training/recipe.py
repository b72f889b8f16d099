"""Recipe: the training procedure; `Execution` says how it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from typing import Any, Literal, get_args

from structured_ensembles.common.checks import (
    check_choice,
    check_flags,
    check_list,
    check_number,
    check_share,
    check_type,
    check_whole,
    convert_fields,
    to_python_number,
)
from structured_ensembles.data.augmentation import Augmentation
from structured_ensembles.training.execution import check_moved

Optimizer = Literal["sgd", "adam", "adamw"]
Schedule = Literal["constant", "step", "cosine"]
Keep = Literal["best", "last"]


@dataclass(frozen=True)
class ParameterRule:
    """Another learning rate or weight decay for the parameters whose qualified name fits `pattern`, such as "*.bias".

    rate_factor: what their learning rate is multiplied with. weight_decay: theirs; None: the recipe's.
    """

    pattern: str
    rate_factor: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        convert_fields(self)
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ValueError(f"pattern must be a name with wildcards, such as '*.bias', not {self.pattern!r}")
        check_number("rate_factor", self.rate_factor)
        if self.weight_decay is not None:
            check_number("weight_decay", self.weight_decay)


def _refuse_moved_settings(recipe_class: type[Recipe]) -> type[Recipe]:
    """Make `Recipe(precision=…)` and `replace(recipe, precision=…)` raise an error that names `Execution`."""
    original_init: Callable[..., None] = recipe_class.__init__

    @wraps(original_init)
    def init(self: Recipe, *values: Any, **keywords: Any) -> None:
        check_moved(keywords)
        original_init(self, *values, **keywords)

    recipe_class.__init__ = init  # type: ignore[method-assign]
    return recipe_class


@_refuse_moved_settings
@dataclass(frozen=True)
class Recipe:
    """The training procedure; `Recipe.named` has those that we use: "modern", "regression" and "paper".

    For members cut out of a network that is already trained: "tune", a third of the epochs of "modern" at half its
    rate; "tune-adamw" if the network was trained with AdamW, such as a transformer; and "tune-regression". Evidence for
    the rate of "tune" is the study `tuned-wide-resnet20` in docs/results.md, on CIFAR-10 with three seeds: four halves
    of a wide ResNet20, trained for 30 epochs and tuned at this rate for 10, are at least as accurate as the network
    trained for 40, with a lower NLL and ECE. The others follow usual practice and are not measured.

    schedule: "constant"; "step" multiplies the rate with `factor` at each of the epochs `milestones`; "cosine" lowers
        it to zero, step by step. Before that, `warmup` epochs raise it linearly.
    patience: stop a member after so many epochs without a better validation result, counted from the first epoch with
        the best result so far; None trains all epochs.
    augmentation: "crop+flip", "crop", "none"; "auto" crops and flips colour images. "crop+flip+cutout" also sets a
        square of half the image's side to the mean colour.
    mixup: blend every sample with another of its batch, labels too; the share is drawn from the Beta distribution with
        both parameters this number, such as 0.2. 0: no blending.
    keep: the weights that a member ends with: those of its "best" validation epoch, or of its "last". The best epoch is
        that of the highest accuracy, of the lowest loss for a regression; of equal ones the later, which has learned
        longer.
    averaging: the share of the epochs, at the end, over whose steps the weights are averaged, all alike, such as 0.25.
        A member ends with that average, whatever `keep` says, and batch norm's statistics are measured anew for it.
        Validation results of single epochs are those of the weights before averaging. 0: no averaging.
    rules: another learning rate or weight decay for some parameters, by a pattern of their names; the last that fits
        counts. `rules=(ParameterRule("*.bias", weight_decay=0.0),)` trains biases without weight decay.
    """

    epochs: int = 60
    batch_size: int = 128
    optimizer: Optimizer = "sgd"
    rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    schedule: Schedule = "cosine"
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    warmup: float = 1.0
    patience: int | None = None
    keep: Keep = "best"
    augmentation: Augmentation = "auto"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    averaging: float = 0.0
    rules: tuple[ParameterRule, ...] = ()

    def __post_init__(self) -> None:
        convert_fields(self)
        for name, least in (("epochs", 0), ("batch_size", 1)):
            check_whole(name, getattr(self, name), least)
        for name in ("rate", "weight_decay", "factor", "warmup", "mixup", "averaging"):
            check_number(name, getattr(self, name))
        check_flags(nesterov=self.nesterov)
        check_share("momentum", self.momentum)
        check_share("label_smoothing", self.label_smoothing)
        check_whole("patience", self.patience, or_none=True)
        if self.averaging > 1:
            raise ValueError(f"averaging must be a share of the epochs, from 0 to 1, not {self.averaging!r}")
        if self.averaging and self.patience is not None:
            raise ValueError(
                f"patience must be None with averaging, not {self.patience!r}: a member that stops early does not "
                "reach the epochs that are averaged"
            )
        choices = {
            "optimizer": Optimizer,
            "schedule": Schedule,
            "keep": Keep,
            "augmentation": Augmentation,
        }
        for name, choice in choices.items():
            check_choice(name, getattr(self, name), get_args(choice))
        check_list("milestones", self.milestones)
        object.__setattr__(self, "milestones", tuple(map(to_python_number, self.milestones)))
        for milestone in self.milestones:
            check_whole("each of milestones", milestone, least=0)
        check_list("rules", self.rules, "ParameterRule")
        object.__setattr__(self, "rules", tuple(map(_as_rule, self.rules)))

    @classmethod
    def named(cls, name: str, **changes: Any) -> Recipe:
        """Return a recipe by name, with some fields changed: `Recipe.named("paper", rate=0.01)` for VGG."""
        if name not in RECIPES:
            raise ValueError(f"name must be one of {', '.join(RECIPES)}, not {name!r}")
        check_moved(changes)
        possible = [field.name for field in fields(cls)]
        if unknown := sorted(changes.keys() - set(possible)):
            raise ValueError(f"a recipe has no {', '.join(map(repr, unknown))}; it has {', '.join(possible)}")
        return replace(RECIPES[name], **changes)

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step number `step`, with `steps` of them in an epoch."""
        epoch = step / steps
        if epoch < self.warmup:
            return self.rate * (step + 1) / math.ceil(self.warmup * steps)
        if self.schedule == "step":
            return self.rate * self.factor ** sum(epoch >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            done = (epoch - self.warmup) / max(self.epochs - self.warmup, 1e-9)
            return self.rate * (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return self.rate

    def averaging_weight(self, step: int, steps: int) -> float:
        """Return the weight of step number `step` in the running average of weights: 1, 1/2, 1/3, …; 0 before."""
        averaged = max(1, round(self.averaging * self.epochs)) if self.averaging else 0
        first = (self.epochs - averaged) * steps
        return 1 / (step - first + 1) if averaged and step >= first else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, by name, as JSON and YAML hold them."""
        return {**asdict(self), "milestones": list(self.milestones), "rules": [asdict(rule) for rule in self.rules]}


def _as_rule(value: Any) -> ParameterRule:
    """Return a rule, built from a dict if it comes from a configuration file."""
    if isinstance(value, Mapping):
        return ParameterRule(**value)
    check_type("each of rules", value, ParameterRule)
    return value  # type: ignore[no-any-return]


def check_recipe(recipe: Recipe | None) -> None:
    """Raise a TypeError unless `recipe` is a Recipe or None."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a Recipe, such as Recipe.named('modern'), not {recipe!r}")


def recipe_for(task: str, recipe: Recipe | None, trained: bool = False) -> Recipe:
    """Return a checked recipe; for None the default of the task, and of networks that are `trained` already or not."""
    check_recipe(recipe)
    return recipe or Recipe.named(default_recipe_name(task, trained))


def default_recipe_name(task: str, trained: bool = False) -> str:
    """Return the name of a task's default recipe."""
    usual, tuning = ("regression", "tune-regression") if task == "regression" else ("modern", "tune")
    return tuning if trained else usual


RECIPES = {
    # The paper's settings; it has rate 0.01 for VGG and patience 5 for SVHN.
    "paper": Recipe(
        epochs=200,
        nesterov=False,
        weight_decay=0.0,
        schedule="step",
        milestones=(50, 100, 150),
        factor=0.8,
        warmup=0.0,
        patience=20,
    ),
    "modern": Recipe(),
    # The gradients of squared errors grow with the targets: at the rates of classification, SGD diverges.
    "regression": Recipe(optimizer="adamw", rate=0.01),
    "tune": Recipe(epochs=20, rate=0.05),
    # SGD at 0.05 would destroy what a transformer has learned.
    "tune-adamw": Recipe(epochs=20, optimizer="adamw", rate=1e-4, weight_decay=0.05, warmup=2.0),
    "tune-regression": Recipe(epochs=20, optimizer="adamw", rate=0.005),
}

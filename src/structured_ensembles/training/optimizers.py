"""Build the optimizer of a network as a recipe says, for the engine that will run it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.training.checkpoint import flatten_optimizer_state, restore_optimizer
from structured_ensembles.training.fused_optimizer import can_be_fused, check_gradient_layouts
from structured_ensembles.training.recipe import ParameterRule, Recipe


def optimizer_for(
    recipe: Recipe, network: nn.Module, rates: Mapping[float, Tensor] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer of a network: one parameter group for each rule of the recipe that applies to it.

    Every group holds its `rate_factor`; its learning rate is the recipe's times that (see `set_rate`).
    rates: for a step that is captured in a CUDA graph, which cannot read a new Python number each time: a tensor with
        the learning rate for each rate factor (see `rate_factors`).
    """
    captured = rates is not None
    groups = _parameter_groups(recipe, network)
    parameters = [parameter for group in groups for parameter in group["params"]]
    for group in groups:
        group["lr"] = rates[group["rate_factor"]] if rates is not None else recipe.rate * group["rate_factor"]
    fused: dict[str, Any] = {"fused": True} if captured or all(map(can_be_fused, parameters)) else {}
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "sgd":
        nesterov = recipe.nesterov and recipe.momentum > 0
        optimizer = torch.optim.SGD(groups, recipe.rate, recipe.momentum, nesterov=nesterov, **fused)
        if fused and recipe.momentum:  # else all parameters would need their first gradient in the same step
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    else:
        if captured and parameters and parameters[0].is_cuda:
            fused["capturable"] = True
        optimizer_class = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
        optimizer = optimizer_class(groups, recipe.rate if rates is None else torch.tensor(recipe.rate), **fused)
    if fused and not captured:
        optimizer.register_step_pre_hook(check_gradient_layouts)
    return optimizer


def check_rules(recipe: Recipe, ensemble: nn.Module) -> None:
    """Raise a ValueError for a rule whose pattern, perhaps misspelt, fits no parameter of any member."""
    members: nn.ModuleList = ensemble.members  # type: ignore[assignment]
    names = {name for member in members for name, _ in member.named_parameters()}
    for rule in recipe.rules:
        if not any(fnmatchcase(name, rule.pattern) for name in names):
            examples = ", ".join(sorted(names)[:3])
            raise ValueError(
                f"pattern {rule.pattern!r} of a rule fits no parameter; parameters have names such as {examples}"
            )


def rate_factors(recipe: Recipe) -> set[float]:
    """Return the factors of the learning rate over all parameter groups."""
    return {1.0, *(rule.rate_factor for rule in recipe.rules)}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each parameter group: `rate` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_factor"]


def _parameter_groups(recipe: Recipe, network: nn.Module) -> list[dict[str, Any]]:
    """Sort the trained parameters into groups, each by the last rule whose pattern fits its name."""
    default = ParameterRule("*")
    by_rule: dict[ParameterRule, list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            rule = next((rule for rule in reversed(recipe.rules) if fnmatchcase(name, rule.pattern)), default)
            by_rule.setdefault(rule, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": recipe.weight_decay if rule.weight_decay is None else rule.weight_decay,
            "rate_factor": rule.rate_factor,
        }
        for rule, parameters in by_rule.items()
    ]


class OptimizerState:
    """The state of a member's optimizer, which outlives the engine that it was built for.

    A run may resume from a checkpoint, or leave a CUDA graph for the plain loop: the new engine builds another
    optimizer and loads the state of the previous one.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        self.loaded = dict(tensors or {})  # from a checkpoint; used until there is an optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return momentum and other state tensors, by name."""
        return self.loaded if self.optimizer is None else flatten_optimizer_state(self.optimizer)

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Load this state into another optimizer of the same network; do nothing where there is none yet."""
        tensors = self.tensors()
        if not tensors:
            return
        rates = [group["lr"] for group in optimizer.param_groups]  # tensors of a CUDA graph, which loading replaces
        restore_optimizer(optimizer, tensors)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

"""Training: recipe (what to do), execution (how to compute it), fleet (all members at once), checkpoints."""

from structured_ensembles.training.execution import Execution
from structured_ensembles.training.history import EpochRow, History
from structured_ensembles.training.recipe import ParameterRule, Recipe
from structured_ensembles.training.teaching import Teacher

__all__ = ["EpochRow", "Execution", "History", "ParameterRule", "Recipe", "Teacher"]

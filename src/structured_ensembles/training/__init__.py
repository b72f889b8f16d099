"""Training: the recipe (what to do), the fleet (all members at once), checkpoints (nothing is lost)."""

from structured_ensembles.training.history import History
from structured_ensembles.training.recipe import ParameterRule, Recipe

__all__ = ["History", "ParameterRule", "Recipe"]

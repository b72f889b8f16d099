"""Recipes for networks that are already trained."""

import pytest

import structured_ensembles as se
from structured_ensembles.training.recipe import recipe_for


def test_tuning_takes_a_third_of_the_epochs_at_half_the_rate() -> None:
    for usual, tuning in (("modern", "tune"), ("regression", "tune-regression")):
        before, after = se.Recipe.named(usual), se.Recipe.named(tuning)
        assert (3 * after.epochs, 2 * after.rate) == (before.epochs, before.rate)
        changed = {name for name, value in after.to_dict().items() if value != before.to_dict()[name]}
        assert changed == {"epochs", "rate"}
    rates = [se.Recipe.named("tune").rate_at(step, 10) for step in range(200)]
    assert max(rates) == pytest.approx(0.05)
    assert rates[-1] < 1e-4


def test_transformers_are_tuned_gently() -> None:
    recipe = se.Recipe.named("tune-adamw")
    assert (recipe.optimizer, recipe.weight_decay, recipe.schedule) == ("adamw", 0.05, "cosine")
    rates = [recipe.rate_at(step, 10) for step in range(10 * recipe.epochs)]
    assert rates[:20] == pytest.approx([1e-4 * (step + 1) / 20 for step in range(20)])  # two epochs of warm-up
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_default_follows_the_task_and_whether_the_network_is_trained() -> None:
    named = {
        ("classification", False): "modern",
        ("classification", True): "tune",
        ("regression", False): "regression",
        ("regression", True): "tune-regression",
    }
    for (task, trained), name in named.items():
        assert recipe_for(task, None, trained) == se.Recipe.named(name)
        assert recipe_for(task, se.Recipe(epochs=3), trained).epochs == 3

"""Random subsets of the studies: those of the method `random`, with shared batches or another training seed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.methods import METHODS
from structured_ensembles.paper.random_subsets import METHOD, train_random_subsets
from structured_ensembles.zoo.by_name import find_function

RECIPE = se.Recipe(epochs=1, batch_size=8, rate=0.05, keep="last")


def toy_data() -> se.Data:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 4, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    return se.Data.from_arrays(x[:32], y[:32], validation=(x[32:40], y[32:40]), test=(x[40:], y[40:]))


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))


def weights(ensemble: se.Ensemble) -> list[torch.Tensor]:
    """Return the flattened parameters of every member."""
    return [
        torch.cat([parameter.detach().flatten() for parameter in member.parameters()]) for member in ensemble.members
    ]


def test_random_subsets_equal_the_method_random_by_default() -> None:
    settings = {"members": 3, "prune": 0.5, "recipe": RECIPE, "seed": 1, "device": "cpu", "quiet": True}
    expected = METHODS["random"](network(), toy_data(), **settings)
    ensemble = find_function("method", METHOD, {})(network(), toy_data(), **settings)
    assert ensemble.subnets == expected.subnets
    assert all(map(torch.equal, weights(ensemble), weights(expected)))


def test_training_seed_changes_the_training_and_not_the_subsets() -> None:
    settings = {"members": 2, "prune": 0.5, "recipe": RECIPE, "device": "cpu", "quiet": True}
    first, second = (train_random_subsets(network(), toy_data(), training_seed=seed, **settings) for seed in (0, 1))
    assert first.subnets == second.subnets
    assert not torch.equal(weights(first)[0], weights(second)[0])


def test_shared_batches_are_those_of_the_first_member() -> None:
    settings = {"members": 2, "prune": 0.0, "recipe": RECIPE, "device": "cpu", "quiet": True}
    shared, own = (
        weights(train_random_subsets(network(), toy_data(), shared_batches=choice, **settings))
        for choice in (True, False)
    )
    assert torch.equal(shared[0], shared[1])  # nothing is pruned: the same network on the same batches
    assert not torch.equal(own[0], own[1])


def test_coupled_subsets_are_those_of_the_method_random_too() -> None:
    torch.manual_seed(0)
    model = se.zoo.resnet20(num_classes=3, in_channels=1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (24, 1, 8, 8), generator=generator).byte(), torch.arange(24) % 3
    settings = {"members": 2, "memory": 1.0, "coupled": True, "device": "cpu", "quiet": True}
    settings |= {"recipe": se.Recipe(epochs=0, keep="last"), "seed": 1}
    ensembles = [
        make(model, se.Data.from_arrays(x, y), **settings) for make in (train_random_subsets, METHODS["random"])
    ]
    assert ensembles[0].subnets == ensembles[1].subnets
    assert len(dict(ensembles[0].subnets[0].kept)) > 9  # more than the first convolutions of nine blocks


@pytest.mark.parametrize("changed", [{"shared_batches": True}, {"training_seed": 3}])
def test_folder_of_another_control_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    settings = {
        "members": 2,
        "prune": 0.5,
        "recipe": RECIPE,
        "device": "cpu",
        "quiet": True,
        "folder": tmp_path / "run",
    }
    train_random_subsets(network(), toy_data(), **settings)
    with pytest.raises(ValueError, match=f"differs in {next(iter(changed))}"):
        train_random_subsets(network(), toy_data(), **settings, **changed)

"""Independent members: each has its own order, crops, dropout and weights, from (seed, member)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.data.drawing import derive_seed
from tests.support.engines import use_engine
from tests.support.networks import network
from tests.support.real_data import few_digits
from tests.support.states import equal, weights

RECIPE = se.Recipe(epochs=2, batch_size=64, rate=0.02, augmentation="crop")


@pytest.fixture(params=["loop", "graph"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train by each engine; the steps of the graph engine run without a graph."""
    use_engine(monkeypatch, request.param)
    return str(request.param)


@pytest.mark.usefixtures("engine")
def test_equal_initial_networks_end_with_different_weights() -> None:
    twins = se.Ensemble([network(0, dropout=0.0), network(0, dropout=0.0)])
    se.train(twins, few_digits(), RECIPE, seed=1, quiet=True)
    one, other = map(weights, twins.members)
    assert not equal(one, other)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("recipe", [RECIPE, se.Recipe(epochs=2, batch_size=64, rate=0.02, augmentation="none")])
def test_members_of_equal_number_train_equally(recipe: se.Recipe) -> None:
    twins = se.Ensemble([network(0, dropout=0.0), network(0, dropout=0.0)])
    se.train(twins, few_digits(), recipe, seed=1, numbers=[4, 4], quiet=True)
    one, other = map(weights, twins.members)
    assert equal(one, other)


class Recording(nn.Module):
    """Keep the batches of training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen.append(x.detach().clone().flatten(1))
        return self.layer(x.flatten(1))


def seen_in_epochs(data: se.Data, **arguments: object) -> list[list[torch.Tensor]]:
    """Return the batches of two epochs for each of three members."""
    members = [Recording() for _ in range(3)]
    recipe = se.Recipe(epochs=2, batch_size=64, augmentation="none")
    se.train(se.Ensemble(members), data, recipe, quiet=True, **arguments)  # type: ignore[arg-type]
    return [member.seen for member in members]


@pytest.mark.usefixtures("engine")
def test_every_member_sees_every_sample_once_per_epoch_in_its_own_order() -> None:
    data = few_digits()
    everything = data.prepare(data.train.inputs[data.train.index]).flatten(1)
    expected = everything[everything.sum(1).argsort()]
    members = seen_in_epochs(data, seed=2)
    orders = []
    for batches in members:
        steps = len(batches) // 2
        for epoch in (batches[:steps], batches[steps:]):
            samples = torch.cat(epoch)
            orders.append(tuple(samples.sum(1).tolist()))
            assert len(samples) == len(data.train)
            torch.testing.assert_close(samples[samples.sum(1).argsort()].sum(1), expected.sum(1))
    assert len(set(orders)) == 6  # three members, two epochs


@pytest.mark.usefixtures("engine")
def test_streamed_batches_are_read_once_and_shared() -> None:
    data = few_digits()
    dataset = torch.utils.data.TensorDataset(data.prepare(data.train.inputs), data.train.targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
    members = seen_in_epochs(se.Data.from_loaders(loader, classes=10), seed=2)
    for batches in members[1:]:
        assert all(torch.equal(one, other) for one, other in zip(members[0], batches, strict=True))


def test_dropout_differs_between_members() -> None:
    """With one image and no crops, only dropout can separate equal networks."""
    twins = se.Ensemble([network(0, dropout=0.5), network(0, dropout=0.5)])
    image = few_digits().train.inputs[:1].repeat(64, 1, 1, 1)
    same = se.Data.from_arrays(image, torch.zeros(64, dtype=torch.long), classes=10, validation=0.0)
    se.train(twins, same, se.Recipe(epochs=1, rate=0.02, augmentation="none"), quiet=True)
    one, other = map(weights, twins.members)
    assert not equal(one, other)


def test_wrong_count_of_member_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="one for each of the 1 networks"):
        se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, numbers=[0, 1], quiet=True)
    with pytest.raises(ValueError, match="each of numbers must be a whole number of at least 0, not -1"):
        se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, numbers=[-1], quiet=True)
    with pytest.raises(ValueError, match=r"each of numbers must be at most 2\*\*63 - 1, not 1180591620717411303424"):
        se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, numbers=[2**70], quiet=True)


def test_no_two_seeds_and_members_share_a_stream() -> None:
    streams = {
        derive_seed(seed, purpose, member)
        for seed in range(60)
        for purpose in ("weights", "order", "crops", "dropout")
        for member in range(60)
    }
    assert len(streams) == 60 * 4 * 60
    assert len({number % 2**32 for number in streams}) == 60 * 4 * 60  # torch's generator on a CPU takes 32 bits


NO_EPOCHS = se.Recipe(epochs=0)
MAKERS: dict[str, Callable[[nn.Module, se.Data, int], se.Ensemble]] = {
    "reinit": lambda model, data, seed: se.structured_ensemble(
        model, data, members=5, recipe=NO_EPOCHS, selection="random", reinit=True, seed=seed, quiet=True
    ),
    "deep": lambda model, data, seed: se.methods.deep_ensemble(model, data, 5, recipe=NO_EPOCHS, seed=seed, quiet=True),
    "narrow": lambda model, data, seed: se.methods.narrow_ensemble(
        model, data, 5, recipe=NO_EPOCHS, seed=seed, quiet=True
    ),
    "magnitude": lambda model, data, seed: se.methods.magnitude_ensemble(
        model, data, 5, recipe=NO_EPOCHS, seed=seed, quiet=True
    ),
}


@pytest.mark.parametrize("method", MAKERS)
def test_seeds_share_no_member_stream(method: str) -> None:
    """With seeds of `seed + member`, seeds 0 and 1 would share four of five members."""
    data = few_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    firsts = [
        tuple(member[3].bias.tolist())  # type: ignore[union-attr, operator]
        for seed in range(3)
        for member in MAKERS[method](model, data, seed).members
    ]
    inherited = 0 if method in ("reinit", "narrow") else 2  # the first member of three seeds has the model's own
    assert len(set(firsts)) == 15 - inherited


@pytest.mark.usefixtures("engine")
def test_crops_differ_between_members() -> None:
    """All samples are one image, so that the order cannot differ."""
    image = few_digits().train.inputs[:1].repeat(64, 1, 1, 1)
    same = se.Data.from_arrays(image, torch.zeros(64, dtype=torch.long), classes=10, validation=0.0)
    members = [Recording() for _ in range(2)]
    se.train(se.Ensemble(members), same, se.Recipe(epochs=1, augmentation="crop"), quiet=True)
    assert not torch.equal(members[0].seen[0], members[1].seen[0])
    members = [Recording() for _ in range(2)]
    se.train(se.Ensemble(members), same, se.Recipe(epochs=1, augmentation="crop"), numbers=[3, 3], quiet=True)
    assert torch.equal(members[0].seen[0], members[1].seen[0])


def test_snapshot_cycles_see_different_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.methods import snapshot

    numbers: list[object] = []
    train = snapshot.train

    def watched(*arguments: object, **keywords: object) -> se.History:
        numbers.append(keywords.get("numbers"))
        return train(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot, "train", watched)
    se.methods.snapshot_ensemble(network(0), few_digits(), 3, recipe=RECIPE, cycle=1, quiet=True)
    assert numbers == [[0], [1], [2]]


def test_checkpoint_of_other_member_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, numbers=[0], checkpoint=path, quiet=True)
    with pytest.raises(ValueError, match="is of another run"):
        se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, numbers=[1], checkpoint=path, quiet=True)

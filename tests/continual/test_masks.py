"""Ownership of neurons: selection, partition, capacity, forgetting, packed bits."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import structured_ensembles as se
from structured_ensembles.continual import PruningLearner, StructuredLearner
from structured_ensembles.continual import learner as learner_module
from structured_ensembles.continual import structured as structured_module
from structured_ensembles.continual.heads import PaperHead, TaskNetwork
from structured_ensembles.continual.masks import Owners
from tests.support.continual_cases import SHORT, inputs_of, learn_and_check, logits_of, make_backbone, make_tasks

TASKS = make_tasks()


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4).flatmap(
        lambda sizes: st.integers(1, 12).flatmap(
            lambda stages: st.tuples(
                st.just(stages),
                st.tuples(*(st.lists(st.integers(-1, stages - 1), min_size=n, max_size=n) for n in sizes)),
            )
        )
    )
)
def test_packed_owners_round_trip_in_the_fewest_bits(case: tuple[int, tuple[list[int], ...]]) -> None:
    stages, groups = case
    owners = Owners({str(index): torch.tensor(group) for index, group in enumerate(groups)}, rest=0)
    sizes = {name: len(group) for name, group in owners.groups.items()}
    layout, packed = owners.pack(stages)
    back = Owners.unpack(layout, packed, sizes, 0, stages)
    assert all(torch.equal(back.groups[name], group) for name, group in owners.groups.items())
    neurons = sum(sizes.values())
    shortest = min(stages, math.ceil(math.log2(stages + 1)))
    assert packed.numel() == shortest * math.ceil(neurons / 8)


@pytest.mark.parametrize("scope", ["layer", "network"])
@pytest.mark.parametrize("extraction", ["hard", "soft"])
def test_tasks_take_the_neurons_with_the_highest_scores(
    scope: str, extraction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are given; the expected neurons come from sorting them here."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(49, 6), nn.ReLU(), nn.Linear(6, 9), nn.ReLU())
    names = {"backbone.1": 6, "backbone.3": 9}
    learner = StructuredLearner(backbone, 0.5, scope, extraction, search_epochs=0, **SHORT)
    drawn: list[dict[str, torch.Tensor]] = []

    def scores(*_: object, **__: object) -> list[se.Scores]:
        drawn.append({name: torch.rand(size) for name, size in names.items()})
        return [se.Scores(drawn[-1])]

    monkeypatch.setattr(structured_module, "saliency", scores)
    free = {(name, neuron) for name, size in names.items() for neuron in range(size)}
    for task in TASKS[:3]:
        learner.learn(task)
        values = {(name, i): float(drawn[-1][name][i]) for name, size in names.items() for i in range(size)}
        pool = free if extraction == "hard" else set(values)
        chosen: set[tuple[str, int]] = set()
        if scope == "network":
            count = len(pool) - math.ceil(0.5 * (len(pool) - 1))
            chosen = set(sorted(pool, key=lambda neuron: -values[neuron])[:count])
        for name in names:
            candidates = sorted((neuron for neuron in pool if neuron[0] == name), key=lambda neuron: -values[neuron])
            count = len(candidates) - math.ceil(0.5 * (len(candidates) - 1)) if scope == "layer" else 0
            chosen |= set(candidates[:count])
            if candidates and not chosen & set(candidates):
                chosen.add(candidates[0])
        taken = {
            (name, int(neuron))
            for name, candidates in learner.shared.owners.groups.items()
            for neuron in torch.nonzero(candidates == task.number).flatten()
        }
        assert taken == chosen & free
        free -= taken


def test_tasks_beyond_capacity_train_their_heads_only_and_warn() -> None:
    """Every task is learned, the last ones by their heads alone."""
    tasks = make_tasks(tasks=12, per_class=8, size=8)
    torch.manual_seed(0)
    learner = StructuredLearner(se.zoo.lenet5_backbone(), search_epochs=1, prune=0.3, **SHORT)
    warned = []
    for task in tasks:
        before = logits_of(learner, tasks)
        warned.append(_free(learner) == 0)
        with (
            pytest.warns(match=f"task {task.number} gets no neuron, as none is free any more")
            if warned[-1]
            else nullcontext()
        ):
            learner.learn(task)
        assert all(torch.equal(logits, learner.logits(inputs_of(tasks[n]), n)) for n, logits in before.items())
    assert warned[0] is False
    assert warned[-1] is True
    capacity = learner.capacity()
    assert capacity.sizes == {"backbone.conv1": 6, "backbone.conv2": 16, "backbone.conv3": 120}
    owned = torch.cat(list(learner.shared.owners.groups.values()))
    assert sorted({int(owner) for owner in owned}) == [
        stage for stage in range(12) if not warned[stage]
    ]  # no other owners
    assert all(sum(capacity.taken[name]) == size for name, size in capacity.sizes.items())
    assert set(capacity.free.values()) == {0}
    assert "task 11" in str(capacity)
    last = learner.logits(inputs_of(tasks[11]), 11)
    assert torch.isfinite(last).all()
    assert learner.memory().masks == 12 * 142
    assert learner.memory().stored_masks == 4 * 142


def _free(learner: StructuredLearner) -> int | None:
    """Count the free neurons; None before the first task."""
    return sum(learner.capacity().free.values()) if learner.learned else None


@pytest.mark.parametrize("kind", [StructuredLearner, PruningLearner])
def test_forget_frees_neurons_and_keeps_other_tasks(kind: type[StructuredLearner]) -> None:
    arguments = {"search_epochs": 1} if kind is StructuredLearner else {"strength": 1e-3}
    learner = kind(make_backbone("residual"), **arguments, **SHORT)
    learn_and_check(learner, TASKS[:3])
    logits, before = logits_of(learner, TASKS), learner.capacity()
    third = sum(taken[2] for taken in before.taken.values())
    middle = learner.forget(1)
    assert (middle.freed, middle.unchanged) == (0, (0, 2))
    assert middle.in_use == sum(taken[1] for taken in before.taken.values())  # task 2 was built on them
    assert learner.capacity().tasks == (0, None, 2)
    with pytest.raises(ValueError, match=r"learned \(0, 2\), not 1"):
        learner.predict(inputs_of(TASKS[1]), task=1)
    last = learner.forget(2)
    assert last.freed == third + middle.in_use
    assert last.unchanged == (0,)
    assert learner.capacity().tasks == (0,)
    assert torch.equal(logits[0], learner.logits(inputs_of(TASKS[0]), 0))
    learner.learn(TASKS[1])
    assert torch.equal(logits[0], learner.logits(inputs_of(TASKS[0]), 0))
    assert sum(taken[1] for taken in learner.capacity().taken.values()) > 0
    learner.forget(1)
    learner.forget(0)
    assert sum(learner.capacity().free.values()) == sum(before.sizes.values())
    learner.learn(TASKS[3])


@pytest.mark.parametrize("kind", [StructuredLearner, PruningLearner])
def test_frozen_weights_are_not_reinitialised(kind: type[StructuredLearner]) -> None:
    """No task could train them again, such as those of a first layer that was trained before."""
    backbone = make_backbone()
    backbone.get_submodule("conv1").requires_grad_(False)
    before = backbone.get_parameter("conv1.weight").clone()
    arguments = {"search_epochs": 1} if kind is StructuredLearner else {"strength": 1e-3, "margin": 0.5}
    learner = kind(backbone, **arguments, **SHORT)
    learn_and_check(learner, TASKS[:2])
    learner.forget(1)
    assert sum(learner.capacity().free.values()) > 0
    assert torch.equal(learner.backbone.get_parameter("conv1.weight"), before)


def test_trained_network_equals_the_stored_task_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen neurons are restored after every step, so that training sees the stored network."""
    learner = StructuredLearner(
        make_backbone("normalized"), search_epochs=1, optimizer="adamw", weight_decay=0.1, rate=0.01, **SHORT
    )
    trained = []
    original = learner_module.fit

    def recorded(network: nn.Module, *arguments: object, **keywords: object) -> list[float]:
        losses = original(network, *arguments, **keywords)
        trained.append(network)
        return losses

    monkeypatch.setattr(learner_module, "fit", recorded)
    for task in TASKS[:3]:
        learner.learn(task)
        x = task.data.prepare(inputs_of(task))
        with torch.no_grad():
            assert torch.equal(trained[-1](x), learner.network(task.number)(x))


def test_features_before_the_papers_head_are_prunable() -> None:
    """The head's copies of a feature are removed with the feature."""
    network = TaskNetwork(make_backbone("plain"), PaperHead(16, 2))
    assert "backbone.conv2" in se.trace(network, torch.zeros(2, 1, 7, 7)).prunable

"""StructuredLearner with a plan: every task gets an equal share of the neurons."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.continual import StructuredLearner
from structured_ensembles.continual.fitting import fold_seed
from structured_ensembles.continual.heads import create_head
from structured_ensembles.continual.structured import count_share
from tests.support.continual_cases import SHORT, inputs_of, learn_and_check, make_backbone, make_tasks

QUICK = {**SHORT, "epochs": 1, "search_epochs": 1}


@pytest.mark.parametrize(
    ("size", "tasks", "shares"),
    [(8, 3, [3, 3, 2]), (16, 5, [4, 3, 3, 3, 3]), (10, 4, [3, 3, 2, 2]), (5, 5, [1] * 5), (2, 3, [1, 1, 0])],
)
def test_shares_are_equal_give_or_take_one(size: int, tasks: int, shares: list[int]) -> None:
    free, counted = size, []
    for stage in range(tasks):
        counted.append(count_share(free, stage, tasks))
        free -= counted[-1]
    assert counted == shares
    assert free == 0


@pytest.mark.parametrize("selection", ["learned", "random"])
def test_each_of_the_planned_tasks_owns_its_share_and_past_logits_stay(selection: str, tmp_path: Path) -> None:
    backbone = make_backbone()  # two convolutions of 8 and 16 channels
    learner = StructuredLearner(backbone, tasks=3, selection=selection, **QUICK)
    tasks = make_tasks(4)
    expected = learn_and_check(learner, tasks[:2])
    path = tmp_path / "learner.safetensors"
    learner.save(path)
    learner = StructuredLearner.load(path, make_backbone(seed=1), device="cpu")  # the plan is in the file
    learner.quiet = True
    learner.learn(tasks[2])
    capacity = learner.capacity()
    assert dict(capacity.taken) == {"backbone.conv1": (3, 3, 2), "backbone.conv2": (6, 5, 5)}
    assert not any(capacity.free.values())
    for number, logits in expected.items():
        assert torch.equal(learner.logits(inputs_of(tasks[number]), number), logits)
    with pytest.warns(UserWarning, match="none is free any more"):
        learner.learn(tasks[3])  # beyond the plan
    assert torch.equal(learner.logits(inputs_of(tasks[0]), 0), expected[0])


def test_without_a_plan_later_tasks_get_fewer_neurons() -> None:
    learner = StructuredLearner(make_backbone(), prune=0.5, **QUICK)
    for task in make_tasks(3)[:3]:
        learner.learn(task)
    assert dict(learner.capacity().taken)["backbone.conv2"] == (8, 4, 2)  # n - ⌈(n-1)/2⌉ of 16, 8 and 4
    assert "tasks" not in learner.settings


class Wave(nn.Module):
    """Fold pixels, so that those of another mean and deviation look altogether different."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(5 * x)


@pytest.mark.parametrize("extraction", ["hard", "soft"])
def test_magnitudes_are_those_of_the_weights_when_a_task_is_learned(extraction: str, tmp_path: Path) -> None:
    """As they are for a learner that was loaded in between; forgetting draws weights anew."""
    settings = {**SHORT, "epochs": 20, "rate": 0.02, "selection": "magnitude", "extraction": extraction}
    tasks, learner = make_tasks(), StructuredLearner(make_backbone(), **settings)
    for task in tasks[:2]:
        learner.learn(task)
    learner.forget(1)
    learner.save(tmp_path / "learner.safetensors")
    loaded = StructuredLearner.load(tmp_path / "learner.safetensors", backbone=make_backbone())
    for one in (learner, loaded):
        one.learn(tasks[3])
    assert torch.equal(learner.logits(inputs_of(tasks[3]), 3), loaded.logits(inputs_of(tasks[3]), 3))
    for name, owners in learner.shared.owners.groups.items():
        assert torch.equal(owners, loaded.shared.owners.groups[name])


def test_search_gets_inputs_as_the_task_is_trained_on() -> None:
    """Under the head that the first task will draw, this backbone is a network trained on pixels in [0,1].

    The search would take such a network for a trained one, and give it pixels in [0,1]; the task trains on others.
    """
    data, seed = se.load_data("digits"), 3
    torch.manual_seed(0)
    trained = nn.Sequential(Wave(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    unit = se.Data.from_arrays(data.train.inputs, data.train.targets, normalization="unit")
    se.train(se.Ensemble([trained]), unit, se.Recipe(epochs=12, rate=0.1), "cpu", quiet=True)
    head = create_head("linear", 10, 10, fold_seed(seed, 0, 1))
    inverse = torch.linalg.pinv(head.weight.detach())
    before_head = nn.Linear(10, 10)
    before_head.load_state_dict({"weight": inverse, "bias": -inverse @ head.bias.detach()})
    learner = StructuredLearner(nn.Sequential(trained, before_head), seed=seed, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.learn(data)
    assert learner.learned[0].normalization == data.normalization


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks": 0}, "tasks must be a whole number of at least 1, or None, not 0"),
        ({"tasks": 2, "scope": "network"}, "scope must be 'layer' and extraction 'hard', not 'network' and 'hard'"),
        ({"tasks": 2, "extraction": "soft"}, "not 'layer' and 'soft'"),
    ],
)
def test_plans_that_cannot_be_are_errors(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredLearner(make_backbone(), **wrong)

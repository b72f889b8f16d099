"""StructuredLearner with a plan: every task gets an equal share of the neurons."""

from pathlib import Path

import pytest
import torch

from structured_ensembles.continual import StructuredLearner
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

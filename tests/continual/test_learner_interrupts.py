"""An interrupt or an error at any moment leaves a learner unchanged or complete."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.continual import (
    LEARNERS,
    BatchEnsembleLearner,
    Learner,
    PruningLearner,
    StructuredLearner,
    Task,
    pruning,
    shared,
)
from structured_ensembles.continual import learner as learner_module
from tests.support.continual_cases import make_backbone, make_tasks

OPTIONS: dict[str, dict[str, Any]] = {"structured": {"search_epochs": 0}}
OURS = se.continual.__path__[0]


def make_learner(method: str) -> Learner:
    arguments = {"epochs": 1, "batch_size": 16, "quiet": True, "device": "cpu", **OPTIONS.get(method, {})}
    return LEARNERS[method](make_backbone("normalized"), **arguments)


def everything(learner: Learner) -> dict[str, Any]:
    """Copy all state of a learner, by name."""
    tensors, details = learner._state()
    modules = {"backbone": learner.backbone, **{f"head {number}": head for number, head in learner.heads.items()}}
    state = {
        f"{module_name}.{name}": tensor
        for module_name, owner in modules.items()
        for name, tensor in owner.state_dict().items()
    }
    contents: dict[str, Any] = {name: tensor.clone() for name, tensor in (state | tensors).items()}
    for module_name, owner in modules.items():
        contents |= {f"{module_name}.{name}.training": module.training for name, module in owner.named_modules()}
        contents |= {
            f"{module_name}.{name}.requires_grad": weight.requires_grad for name, weight in owner.named_parameters()
        }
        contents |= {f"{module_name}.{name}.grad": weight.grad for name, weight in owner.named_parameters()}
    if hasattr(learner, "capacity"):
        contents["capacity"] = learner.capacity()
    return contents | {
        "details": deepcopy(details),
        "learned": dict(learner.learned),
        "attributes": sorted(vars(learner)),
    }


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    def equal(first: Any, second: Any) -> bool:
        return torch.equal(first, second) if isinstance(first, Tensor) else bool(first == second)

    return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before line number `line` of the package runs; yield the number of lines so far."""
    passed = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # it may be closed where the interrupt is swallowed
        if generator or not frame.f_code.co_filename.startswith(OURS):
            return None
        if event in ("line", "return"):
            passed[0] += 1
            if passed[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)


def some_lines(total: int, spread: int = 3, last: int = 5) -> list[int]:
    """Choose lines spread over a call, and all of the last ones, which change the learner."""
    return sorted({*range(1, total, max(1, total // spread)), *range(max(1, total - last), total + 1)})


def trained_instantly(
    network: nn.Module, _data: se.Data, _recipe: Any, seed: tuple[int, int], *_: Any, **__: Any
) -> list[float]:
    """Change every trainable weight, in place of `fit`; the seed is (the learner's, the task's number)."""
    number = seed[1]
    with torch.no_grad():
        for weight in network.parameters():
            if weight.requires_grad:
                weight.add_(0.01 * (number + 1) * torch.sign(weight) + 0.001)
    network.eval()
    return [1.0]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Make tasks of two classes, on a backbone that is traced once: `learn` is called a hundred times."""
    graphs: list[se.ChannelGraph] = []

    def traced_once(*arguments: Any, **keywords: Any) -> se.ChannelGraph:
        if not graphs:
            graphs.append(se.trace(*arguments, **keywords))
        return graphs[0]

    monkeypatch.setattr(shared, "trace", traced_once)
    monkeypatch.setattr(pruning, "THRESHOLDS", (0.0, 0.5))  # a short sweep
    return make_tasks(tasks=3)


@pytest.mark.parametrize("method", LEARNERS)
def test_interrupt_at_any_line_of_learn_leaves_the_learner_whole(
    method: str, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "fit", trained_instantly)
    make_learner(method).learn(tasks[0])  # traces the backbone, which takes long where lines are counted
    learner, calm = make_learner(method), make_learner(method)
    for task, chosen in zip(tasks, ((1, 3), (3, 5)), strict=False):  # the first task is special to some methods
        with interrupted_at(-1) as lines:
            calm.learn(task)
        before, after = everything(learner), everything(calm)
        for line in some_lines(lines[0], *chosen):
            with suppress(KeyboardInterrupt), interrupted_at(line):  # what is cached since then has fewer lines
                learner.learn(task)
            contents = everything(learner)
            complete = task.number in learner.learned
            assert same(contents, after if complete else before), f"interrupted at line {line} of {lines[0]}"
            if complete:
                break
        assert complete, "the last line comes after all is done"


@pytest.mark.parametrize("method", LEARNERS)
def test_error_in_training_leaves_the_learner_unchanged(
    method: str, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(method)

    def diverge(*arguments: Any, **keywords: Any) -> list[float]:
        trained_instantly(*arguments, **keywords)
        raise FloatingPointError("the loss became nan")

    for task in tasks[:2]:
        before = everything(learner)
        with monkeypatch.context() as patch:
            patch.setattr(learner_module, "fit", diverge)
            with pytest.raises(FloatingPointError):
                learner.learn(task)
        assert same(everything(learner), before)
        with monkeypatch.context() as patch:
            patch.setattr(learner_module, "fit", trained_instantly)
            learner.learn(task)
        assert not same(everything(learner), before)  # else the comparison would be worth nothing


@pytest.mark.parametrize("kind", [StructuredLearner, PruningLearner])
def test_interrupt_at_any_line_of_forget_leaves_the_learner_whole(
    kind: type[StructuredLearner | PruningLearner], tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "fit", trained_instantly)
    learner, calm = (make_learner(kind.method) for _ in range(2))
    assert isinstance(learner, kind)
    assert isinstance(calm, kind)
    for task in tasks[:2]:
        learner.learn(task)
        calm.learn(task)
    with interrupted_at(-1) as lines:
        calm.forget(tasks[1].number)
    before, after = everything(learner), everything(calm)
    for line in some_lines(lines[0]):
        with suppress(KeyboardInterrupt), interrupted_at(line):
            learner.forget(tasks[1].number)
        complete = tasks[1].number not in learner.learned
        assert same(everything(learner), after if complete else before), f"interrupted at line {line} of {lines[0]}"
        if complete:
            return
    raise AssertionError("the last line comes after all is done")


def test_first_task_of_a_batch_ensemble_trains_the_shared_weights(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "fit", trained_instantly)
    learner = make_learner("batch-ensemble")
    assert isinstance(learner, BatchEnsembleLearner)
    weight = learner.backbone.layers[0].weight.detach().clone()
    learner.learn(tasks[0])
    first = learner.backbone.layers[0].weight.detach().clone()
    torch.testing.assert_close(first, weight + 0.01 * torch.sign(weight) + 0.001)
    learner.learn(tasks[1])
    assert torch.equal(learner.backbone.layers[0].weight, first)

"""Captured steps never wait for the device: checked without a GPU, by watching every operation.

A step of a CUDA graph may neither read a number from the device nor bring one to it. On a CPU all would work, so here
the CPU is "the device": whatever is made without saying where lands elsewhere, and operations that would wait are
refused.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import structured_ensembles as se
from structured_ensembles.continual import LEARNERS
from structured_ensembles.cuda import capture
from structured_ensembles.cuda.prediction_graphs import capture_prediction
from structured_ensembles.methods import METHODS
from structured_ensembles.training import graph_engine as graph
from tests.support.capture_rules import InAGraph, as_in_a_graph
from tests.support.continual_cases import SHORT, make_backbone, make_tasks
from tests.support.engines import use_engine
from tests.support.networks import Viewing, network, pruned
from tests.support.real_data import few_digits

Step = Callable[[], None]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Step]]:
    """Run each step once as it is, then under the rules of a capture; list the steps that ran so."""
    replayed: list[Step] = []

    def all_captured(steps: Sequence[Step], *_: object, **__: object) -> list[Step]:
        def one(step: Step) -> Step:
            runs = 0

            def run() -> None:
                nonlocal runs
                runs += 1
                if runs == 1:
                    return step()
                with as_in_a_graph():
                    step()
                return replayed.append(step)

            return run

        return [one(step) for step in steps]

    monkeypatch.setattr(capture, "all_captured", all_captured)
    monkeypatch.setattr(graph, "all_captured", all_captured)
    use_engine(monkeypatch, "graph")
    monkeypatch.setattr(InAGraph, "optimizing", False)
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: setattr(InAGraph, "optimizing", True)),
        register_optimizer_step_post_hook(lambda *_: setattr(InAGraph, "optimizing", False)),
    ]
    yield replayed
    for hook in hooks:
        hook.remove()
    assert replayed


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.usefixtures("watched")
def test_training_steps_never_wait_for_the_device(precision: Any, optimizer: str) -> None:
    """Networks of odd widths, which are padded in bfloat16, are among them."""
    members = [pruned(0.8, in_channels=1), network(1, width=5, dropout=0.3), Viewing(1)]
    recipe = se.Recipe(epochs=3, batch_size=96, rate=0.02, optimizer=optimizer, augmentation="crop", patience=1)
    execution = se.Execution(precision=precision)
    se.train(se.Ensemble(members), few_digits(), recipe, "cpu", execution=execution, quiet=True)


@pytest.mark.usefixtures("watched")
def test_steps_that_cut_blend_and_average_never_wait_for_the_device() -> None:
    members = [network(0, dropout=0.0), Viewing(1)]
    recipe = se.Recipe(epochs=2, batch_size=96, rate=0.02, averaging=0.5, mixup=0.3, augmentation="crop+flip+cutout")
    se.train(se.Ensemble(members), few_digits(), recipe, "cpu", quiet=True)


@pytest.mark.parametrize(("precision", "mixup"), [("float32", 0.0), ("bfloat16", 0.3)])
@pytest.mark.usefixtures("watched")
def test_steps_with_a_teacher_never_wait_for_the_device(precision: Any, mixup: float) -> None:
    """The teacher has a normalisation of its own, and BatchEnsemble's members in one network."""
    shared = METHODS["batch-ensemble"](network(2), few_digits(), 2, recipe=se.Recipe(epochs=1), quiet=True)
    teacher = se.Ensemble([network(7), *shared.members], normalization=se.Normalization((0.2,), (0.5,)))
    recipe = se.Recipe(epochs=2, batch_size=96, rate=0.02, mixup=mixup, augmentation="crop")
    members = [network(0, dropout=0.0), network(1, dropout=0.0), Viewing(1)]
    execution = se.Execution(precision=precision)
    se.train(
        se.Ensemble(members), few_digits(), recipe, "cpu", execution=execution, teacher=se.Teacher(teacher), quiet=True
    )


@pytest.mark.parametrize("scale", [1.0, 1e5])  # as it is, and in units of its own
@pytest.mark.usefixtures("watched")
def test_regression_steps_never_wait_for_the_device(scale: float) -> None:
    x, recipe = torch.randn(300, 6), se.Recipe(epochs=2, rate=0.01)
    data, model = se.Data.from_arrays(x, x.sum(1) * scale), se.zoo.mlp(6, 1)
    ensemble = se.structured_ensemble(model, data, 2, recipe=recipe, search_epochs=1, device="cpu", quiet=True)
    assert (ensemble.units is not None) == (scale > 1)


@pytest.mark.parametrize("method", ["snapshot", "batch-ensemble", "mc-dropout"])
@pytest.mark.usefixtures("watched")
def test_training_steps_of_other_methods_never_wait_for_the_device(method: str) -> None:
    model = se.zoo.resnet20(in_channels=1)
    METHODS[method](model, few_digits(), members=2, recipe=se.Recipe(epochs=4), quiet=True)


@pytest.mark.parametrize("diversity", ["mmd", "overlap", None])
@pytest.mark.usefixtures("watched")
def test_search_and_saliency_steps_never_wait_for_the_device(diversity: Any) -> None:
    data, model = few_digits(), se.zoo.resnet20(in_channels=1)
    traced = se.trace(model, data.example())
    scales = se.learn_scales(
        model, traced, data, members=3, epochs=2, batch_size=64, diversity=diversity, device="cpu", quiet=True
    )
    se.saliency(model, traced, scales, data, batch_size=64, device="cpu", quiet=True)


@pytest.mark.usefixtures("watched")
def test_search_steps_of_a_program_never_wait_for_the_device() -> None:
    data, model = few_digits(), se.zoo.resnet20(in_channels=1)
    traced = se.trace(model, data.example())
    settings = {"members": 3, "epochs": 2, "batch_size": 64, "device": "cpu", "quiet": True}
    se.learn_scales(model, traced, data, precision="bfloat16", **settings)


@pytest.mark.parametrize("images", [3, 80])
@pytest.mark.parametrize("kind", [Viewing, se.zoo.resnet20])
def test_captured_prediction_never_waits_and_equals_the_plain_pass(
    watched: list[Step], images: int, kind: Callable[..., nn.Module]
) -> None:
    ensemble = se.Ensemble([kind(10) if kind is se.zoo.resnet20 else kind(3) for _ in range(2)]).eval()
    x = torch.rand(images, 3, 8, 8)
    captured = capture_prediction(ensemble, x)
    captured.replay()
    assert isinstance(captured.inputs, Tensor)
    captured.inputs.copy_(x.flip(0))
    with torch.no_grad():
        captured.replay()
        torch.testing.assert_close(torch.cat(captured.outputs), ensemble(x.flip(0)), rtol=1e-4, atol=1e-4)
    assert len(watched) == 1


def test_prediction_graphs_are_dropped_when_weights_move_or_mode_changes(
    watched: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape is replayed from its fourth prediction on, until a tensor has moved."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)  # part of what a graph is kept by
    data = few_digits()
    ensemble = se.Ensemble([network(0, dropout=0.5), network(1, width=5)])
    se.train(ensemble, data, se.Recipe(epochs=1), "cpu", quiet=True)
    replays, x = ensemble.replays, data.prepare(data.train.inputs[:6])

    def predicted(x: Tensor) -> Tensor | None:
        with torch.no_grad():
            outputs = replays.replay(ensemble, x)
        with torch.enable_grad():
            expected = ensemble(x).detach()
        if outputs is not None:
            torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
        return outputs

    before = len(watched)
    assert [predicted(x) is None for _ in range(6)] == [True, True, True, False, False, False]
    assert predicted(x.flip(0)) is not None  # another batch of the same shape
    assert predicted(x[:1]) is None
    assert len(watched) == before + 3
    with torch.no_grad():
        next(ensemble.parameters()).mul_(2)
    assert predicted(x) is not None
    weight = next(ensemble.parameters())
    weight.data = 3 * weight.data
    assert predicted(x) is None  # its graph read where the weight was
    assert not replays.graphs
    for _ in range(3):
        predicted(x)
    assert len(replays.graphs) == 1
    ensemble.members[0].train()
    with torch.no_grad():
        assert replays.replay(ensemble, x) is None


@pytest.mark.parametrize("method", LEARNERS)
@pytest.mark.filterwarnings("ignore:task . gets no neuron")
@pytest.mark.usefixtures("watched")
def test_continual_steps_never_wait_for_the_device(method: str) -> None:
    settings = {"search_epochs": 2} if method == "structured" else {}
    learner = LEARNERS[method](make_backbone(), device="cpu", **SHORT, **settings)
    for task in make_tasks()[:2]:
        learner.learn(task)


class Reading(nn.Module):
    """Break a capture in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(64, 10), how

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x.flatten(1))
        match self.how:
            case "item":
                return outputs * (1 + 0 * outputs.detach().sum().item())
            case "tolist":
                return outputs * (1 + 0 * outputs.detach().tolist()[0][0])
            case "mask":
                return outputs + 0 * outputs[outputs > 0].sum()
            case "from the host":
                return outputs + torch.arange(10.0)
            case _:
                return outputs * torch.tensor(2.0, device=outputs.device)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("item", "_local_scalar_dense.default waits"),
        ("tolist", "tolist waits"),
        ("mask", "waits"),
        ("from the host", "on the host|meta"),
        ("a constant", "lift_fresh(_copy)?.default waits|on the host"),
    ],
)
@pytest.mark.usefixtures("watched")
def test_operations_that_wait_for_the_device_are_detected(how: str, message: str) -> None:
    se.train(se.Ensemble([se.zoo.mlp(64)]), few_digits(), se.Recipe(epochs=2), "cpu", quiet=True)
    with pytest.raises((AssertionError, RuntimeError), match=message):
        se.train(se.Ensemble([Reading(how)]), few_digits(), se.Recipe(epochs=2), "cpu", quiet=True)

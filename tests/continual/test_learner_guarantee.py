"""The guarantee: whatever is learned later, the logits of every earlier task stay bit-identical."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.continual import PruningLearner, StructuredLearner
from structured_ensembles.continual.freezing import freeze
from structured_ensembles.continual.heads import TaskNetwork
from tests.support.continual_cases import SHORT, inputs_of, learn_and_check, make_backbone, make_tasks

OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "rate": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "rate": 0.01, "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "rate": 0.01, "weight_decay": 0.1},
}
TASKS = make_tasks()
pytestmark = pytest.mark.filterwarnings("ignore:task . gets no neuron")  # small backbones fill up


@pytest.mark.parametrize("backbone", ["plain", "normalized", "residual"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_earlier_logits_stay_bit_identical_for_every_optimizer_and_backbone(
    backbone: str, optimizer: str, tmp_path: Path
) -> None:
    """Also after save, load and a further task, with the result of a learner that was never saved."""
    learner = StructuredLearner(make_backbone(backbone), search_epochs=1, **OPTIMIZERS[optimizer], **SHORT)
    learn_and_check(learner, TASKS[:3])
    learner.save(tmp_path / "learner.safetensors")
    loaded = StructuredLearner.load(tmp_path / "learner.safetensors", backbone=make_backbone(backbone, seed=9))
    loaded.quiet = True
    ends = [learn_and_check(continued, TASKS) for continued in (learner, loaded)]
    assert ends[0].keys() == ends[1].keys() == {0, 1, 2, 3}
    for number in ends[0]:
        assert torch.equal(ends[0][number], ends[1][number])


@pytest.mark.parametrize("setting", list(itertools.product(["layer", "network"], ["hard", "soft"], [True, False])))
def test_earlier_logits_stay_bit_identical_for_every_scope_extraction_and_seal(setting: tuple[str, str, bool]) -> None:
    scope, extraction, seal = setting
    learner = StructuredLearner(
        make_backbone("normalized"), scope=scope, extraction=extraction, seal=seal, search_epochs=1, **SHORT
    )
    learn_and_check(learner, TASKS)


def test_earlier_logits_stay_bit_identical_for_pruning() -> None:
    learn_and_check(PruningLearner(make_backbone("residual"), **SHORT), TASKS)


def test_naive_learner_changes_earlier_logits() -> None:
    with pytest.raises(AssertionError, match="task 0 changed"):
        learn_and_check(se.continual.NaiveLearner(make_backbone(), **SHORT), TASKS)


def test_weights_of_frozen_neurons_stay_and_others_change() -> None:
    """Compares the raw tensors row by row."""
    learner = StructuredLearner(make_backbone("plain"), search_epochs=1, **OPTIMIZERS["adamw"], **SHORT)
    learner.learn(TASKS[0])
    before = {name: tensor.clone() for name, tensor in learner.backbone.state_dict().items()}
    first = learner.shared.owners
    learner.learn(TASKS[1])
    second = learner.shared.owners
    for layer in ("conv1", "conv2"):
        for neuron in range(len(first.groups[f"backbone.{layer}"])):
            owner, later = (
                int(first.groups[f"backbone.{layer}"][neuron]),
                int(second.groups[f"backbone.{layer}"][neuron]),
            )
            for attribute in ("weight", "bias"):
                old, new = (
                    before[f"{layer}.{attribute}"][neuron],
                    learner.backbone.get_parameter(f"{layer}.{attribute}")[neuron],
                )
                assert torch.equal(old, new) == (later != 1), (
                    f"{layer}.{attribute}[{neuron}] of owner {owner} then {later}"
                )


def test_task_network_equals_the_backbone_with_other_neurons_zeroed() -> None:
    """The reference zeroes the weights that read dropped channels and runs the full backbone."""
    learner = StructuredLearner(make_backbone("normalized"), search_epochs=1, **SHORT)
    learn_and_check(learner, TASKS[:3])
    task = TASKS[1]
    used, head = learner.shared.owners.used(learner.stages[1]), learner.heads[1]
    wide = nn.Linear(10, 2)
    with torch.no_grad():
        wide.weight.fill_(7.0)  # must not matter where it reads a dropped feature
        wide.weight[:, list(used["backbone.layers.7"])] = head.weight
        wide.bias.copy_(head.bias)
    network = TaskNetwork(learner.backbone, wide).eval()
    graph = learner.shared.trace(wide, task.data.example())
    subnet = se.Subnet(tuple((name, graph.prunable[name], kept) for name, kept in used.items()))
    reference = without_channels(network, graph, subnet)(task.data.prepare(inputs_of(task)))
    torch.testing.assert_close(learner.logits(inputs_of(task), 1), reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seal", [True, False])
def test_sealed_neurons_have_equal_activations_under_later_masks(seal: bool) -> None:
    learner = StructuredLearner(make_backbone("normalized"), search_epochs=1, seal=seal, **SHORT)
    learn_and_check(learner, TASKS)
    pixels = TASKS[0].data.prepare(inputs_of(TASKS[0]))
    first, last = (learner.network(number).backbone(pixels) for number in (0, 3))
    used = [learner.shared.owners.used(learner.stages[number])["backbone.layers.7"] for number in (0, 3)]
    positions = [used[1].index(neuron) for neuron in used[0]]
    assert torch.allclose(first, last[:, positions], atol=1e-5) == seal


@pytest.mark.parametrize("backbone", ["normalized", "residual"])
def test_frozen_neurons_have_equal_activations_in_training_and_evaluation(backbone: str) -> None:
    """Their batch norms use running statistics while those of new neurons collect theirs."""
    learner = StructuredLearner(make_backbone(backbone), search_epochs=1, **SHORT)
    learn_and_check(learner, TASKS[:2])
    head = nn.Linear(10 if backbone == "normalized" else 6, 2)
    graph = learner.shared.trace(head, TASKS[2].data.example())
    free = learner.shared.owners.free()
    subnetwork = learner.shared.cut(
        TaskNetwork(learner.backbone, head), graph, {name: neurons[:1] for name, neurons in free.items()}
    )
    restore = freeze(subnetwork.network.backbone, subnetwork.past)
    last = "backbone.layers.7" if backbone == "normalized" else "backbone.stem"
    old = [position for position, neuron in enumerate(subnetwork.kept[last]) if neuron not in free[last]]
    new = [position for position, neuron in enumerate(subnetwork.kept[last]) if neuron in free[last]]
    x = TASKS[2].data.prepare(inputs_of(TASKS[2]))
    features = {mode: subnetwork.network.backbone.train(mode)(x) for mode in (True, False)}
    restore()
    torch.testing.assert_close(features[True][:, old], features[False][:, old], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(features[True][:, new], features[False][:, new], atol=1e-3)


class HalfMaskable(nn.Module):
    """Mix the channels of the second layer, so that it cannot be masked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.conv2(torch.relu(self.conv1(x)))).softmax(1)
        return torch.relu(self.last(mixed.mean((2, 3))))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_unmaskable_layers_are_trained_in_the_first_task_only(optimizer: str) -> None:
    torch.manual_seed(0)
    learner = StructuredLearner(HalfMaskable(), selection="random", **OPTIMIZERS[optimizer], **SHORT)
    fixed = [learner.backbone.conv2.weight.clone()]
    learner.learn(TASKS[0])
    fixed.append(learner.backbone.conv2.weight.clone())
    learn_and_check(learner, TASKS)
    assert set(learner.capacity().sizes) == {"backbone.conv1", "backbone.last"}
    assert not torch.equal(*fixed)
    assert torch.equal(fixed[1], learner.backbone.conv2.weight)


class RandomBackbone(nn.Module):
    """Stack convolutions with or without bias, batch norm and skips, by a list of choices."""

    def __init__(self, widths: list[int], norms: list[bool], skips: list[bool], smooth: bool) -> None:
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        inputs = 1
        for width, norm in zip(widths, norms, strict=True):
            self.convs.append(nn.Conv2d(inputs, width, 3, padding=1, bias=not norm))
            self.norms.append(nn.BatchNorm2d(width) if norm else nn.Identity())
            inputs = width
        # Only where the shapes allow it; decided here, as code that looks at shapes cannot be masked.
        self.skips = [
            skip and conv.in_channels == conv.out_channels for skip, conv in zip(skips, self.convs, strict=True)
        ]
        self.activation = nn.Sigmoid() if smooth else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, skip in zip(self.convs, self.norms, self.skips, strict=True):
            y = self.activation(norm(conv(x)))
            x = y + x if skip else y
        return x.mean((2, 3))


@given(
    layers=st.lists(st.tuples(st.sampled_from([3, 5]), st.booleans(), st.booleans()), min_size=1, max_size=3),
    smooth=st.booleans(),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    scope=st.sampled_from(["layer", "network"]),
    extraction=st.sampled_from(["hard", "soft"]),
    prune=st.sampled_from([0.0, 0.3, 0.7]),
    seal=st.booleans(),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_earlier_logits_stay_bit_identical_for_random_backbones(
    layers: list[tuple[int, bool, bool]],
    smooth: bool,
    optimizer: str,
    scope: str,
    extraction: str,
    prune: float,
    seal: bool,
) -> None:
    torch.manual_seed(len(layers))
    widths, norms, skips = map(list, zip(*layers, strict=True))
    learner = StructuredLearner(
        RandomBackbone(widths, norms, skips, smooth),
        prune,
        scope,
        extraction,
        seal=seal,
        selection="random",
        **OPTIMIZERS[optimizer],
        **SHORT,
    )
    learn_and_check(learner, TASKS[:3])
    capacity = learner.capacity()
    for name, size in capacity.sizes.items():
        assert sum(capacity.taken[name]) + capacity.free[name] == size

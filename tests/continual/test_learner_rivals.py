"""The learners we compare with, each checked against its paper; memory of every learner."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.continual import (
    LEARNERS,
    BatchEnsembleLearner,
    NaiveLearner,
    PruningLearner,
    SingleModelLearner,
    SupSupLearner,
    paper_memory,
)
from structured_ensembles.continual.pruning import measure_activity
from structured_ensembles.continual.supsup import Supermask
from tests.support.continual_cases import SHORT, inputs_of, learn_and_check, logits_of, make_backbone, make_tasks

TASKS = make_tasks()
pytestmark = pytest.mark.filterwarnings("ignore:task . gets no neuron")  # small backbones fill up


def state(learner: se.continual.Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.backbone.state_dict().items()}


@pytest.mark.parametrize("method", [name for name in LEARNERS if name != "naive"])
@pytest.mark.parametrize("backbone", ["plain", "normalized"])
def test_every_learner_but_naive_keeps_earlier_logits(method: str, backbone: str) -> None:
    learn_and_check(LEARNERS[method](make_backbone(backbone), weight_decay=0.01, **SHORT), TASKS[:3])


def test_single_model_trains_a_new_network_per_task() -> None:
    learner = SingleModelLearner(make_backbone("normalized"), **SHORT)
    for task in TASKS[:3]:
        learner.learn(task)
        alone = NaiveLearner(make_backbone("normalized"), **SHORT)
        alone.learn(task)
        assert torch.equal(*(compared.logits(inputs_of(task), task.number) for compared in (learner, alone)))


def test_supsup_keeps_all_weights_and_masks_half_of_them() -> None:
    learner = SupSupLearner(make_backbone("plain"), **SHORT)
    before = state(learner)
    for task in TASKS[:2]:
        learner.learn(task)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.backbone.state_dict().items())
    for name, inputs in (("conv1.weight", 9), ("conv2.weight", 8 * 9)):
        assert before[name].abs().unique().tolist() == pytest.approx([math.sqrt(2 / (inputs / 2))])
        masks = [learner.network(number).backbone.get_parameter(name) != 0 for number in (0, 1)]
        for mask, number in zip(masks, (0, 1), strict=True):
            assert int(mask.sum()) == mask.numel() // 2
            seen = learner.network(number).backbone.get_parameter(name)
            assert torch.equal(seen[mask], before[name][mask])
        assert not torch.equal(*masks)


def test_memory_of_supsup_has_the_statistics_of_norms_of_every_task() -> None:
    learner = SupSupLearner(make_backbone("normalized"), **SHORT)
    for task in TASKS[:2]:
        learner.learn(task)
    assert learner.memory().factors == 2 * 2 * (6 + 8 + 10)  # tasks, mean and variance, channels
    weights = [tensor for tensor in learner.backbone.parameters() if tensor.dim() > 1]
    assert learner.memory().masks == 2 * sum(map(torch.numel, weights))


def test_supermask_equals_a_hand_computation() -> None:
    """Forward keeps the largest |scores|; backward treats the mask as the |scores| themselves."""
    mask = Supermask(torch.Size([2, 3]), keep=0.5, seed=0)
    with torch.no_grad():
        mask.scores.copy_(torch.tensor([[0.1, -0.9, 0.3], [-0.2, 0.8, -0.5]]))
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    seen = mask(weight)
    assert seen.tolist() == [[0, 2, 0], [0, 5, 6]]
    direction = torch.tensor([[1.0, 1.0, -1.0], [2.0, 0.5, 1.0]])
    (gradient,) = torch.autograd.grad((seen * direction).sum(), [mask.scores])
    assert gradient.tolist() == [[1.0, -2.0, -3.0], [-8.0, 2.5, -6.0]]
    assert Supermask(torch.Size([2, 3]), keep=1.0, seed=0).mask().all()


def test_batch_ensemble_keeps_the_weights_of_the_first_task() -> None:
    learner = BatchEnsembleLearner(make_backbone("plain"), **SHORT)
    start = state(learner)
    learner.learn(TASKS[0])
    first = state(learner)
    learner.learn(TASKS[1])
    second = state(learner)
    for name in ("conv1.weight", "conv2.weight"):
        assert not torch.equal(start[name], first[name])
        assert torch.equal(first[name], second[name])
        for number in (0, 1):
            ratio = learner.network(number).backbone.get_parameter(name) / first[name]
            matrix = ratio.flatten(2)[:, :, 0]
            torch.testing.assert_close(ratio, matrix[:, :, None, None].expand_as(ratio))
            assert int(torch.linalg.matrix_rank(matrix.double(), rtol=1e-4)) == 1
    backbone = learner.network(1).backbone
    assert not torch.equal(backbone.conv1.bias, learner.network(0).backbone.conv1.bias)  # biases are every task's own
    untrained = BatchEnsembleLearner(make_backbone("plain"), epochs=0, quiet=True)
    untrained.learn(TASKS[0])
    weight = untrained.network(0).backbone.conv2.weight
    assert torch.equal(weight.abs(), start["conv2.weight"].abs())  # signs only
    assert not torch.equal(weight, start["conv2.weight"])


def test_factors_of_a_batch_ensemble_have_no_weight_decay() -> None:
    """The first step's gradient does not depend on the decay, so that only what decays differs after it."""
    step = {"epochs": 1, "batch_size": 1000, "optimizer": "sgd", "rate": 0.1, "momentum": 0.0, "quiet": True}
    learners = [BatchEnsembleLearner(make_backbone("plain"), weight_decay=decay, **step) for decay in (0.0, 0.5)]
    for learner in learners:
        learner.learn(TASKS[0])
    plain, decayed = (learner.task_tensors[0] for learner in learners)
    for name in ("conv1.weight#outputs", "conv1.weight#inputs", "conv2.weight#outputs", "conv2.weight#inputs"):
        assert torch.equal(plain[name], decayed[name])
    torch.testing.assert_close(plain["conv1.bias"] - decayed["conv1.bias"], 0.05 * make_backbone("plain").conv1.bias)


def test_pruning_learns_later_tasks_and_cuts_connections_to_new_neurons() -> None:
    """The authors' own code stops learning after the second task."""
    learner = PruningLearner(make_backbone("plain"), strength=1e-3, margin=0.2, **{**SHORT, "epochs": 8})
    for task in TASKS:
        before, free = state(learner), learner.shared.owners.free()
        learner.learn(task)
        owners = learner.shared.owners
        taken = owners.count(task.number)
        if free:
            assert sum(taken.values()) > 0
            new = torch.nonzero(owners.groups["backbone.conv2"] == task.number).flatten()
            assert not torch.equal(before["conv2.weight"][new], learner.backbone.conv2.weight[new])
        still_free = torch.nonzero(owners.groups["backbone.conv2"] == -1).flatten()
        if len(still_free):
            assert not torch.equal(before["conv2.weight"][still_free], learner.backbone.conv2.weight[still_free])
        # No connections from neurons outside the task's mask into its own.
        used = set(owners.used(task.number)["backbone.conv1"])
        for neuron in torch.nonzero(owners.groups["backbone.conv2"] == task.number).flatten():
            for other in set(range(8)) - used:
                assert not learner.backbone.conv2.weight[neuron, other].any()
    assert sum(counts[3] for counts in learner.capacity().taken.values()) > 0  # the fourth task still found neurons


def test_pruning_loses_no_more_accuracy_than_its_margin() -> None:
    kept = {}
    for margin in (0.0, 0.3):
        learner = PruningLearner(make_backbone("plain"), margin=margin, strength=0.0, **{**SHORT, "epochs": 20})
        unpruned = NaiveLearner(make_backbone("plain"), **{**SHORT, "epochs": 20})  # without L1: the same training
        for compared in (learner, unpruned):
            compared.learn(TASKS[0])
        validation = TASKS[0].data.split("validation")
        inputs, targets = validation.inputs[validation.index], validation.targets[validation.index]
        pruned, full = ((compared.predict(inputs, 0) == targets).double().mean() for compared in (learner, unpruned))
        assert pruned >= full - margin - 1e-9
        kept[margin] = sum(learner.shared.owners.count(0).values())
    assert kept[0.3] < kept[0.0] < 24


def test_weights_of_the_pruning_learner_have_an_l1_penalty() -> None:
    """After one step of plain SGD, a penalty of 0.1 has moved every weight by a tenth of the rate towards zero."""
    step = {"epochs": 1, "batch_size": 1000, "optimizer": "sgd", "rate": 0.01, "momentum": 0.0, "quiet": True}
    start = make_backbone("plain").conv1.weight.detach()
    learners = [PruningLearner(make_backbone("plain"), strength=strength, **step) for strength in (0.0, 0.1)]
    for learner in learners:
        learner.learn(TASKS[0])
    owned = [set(learner.shared.owners.used(0)["backbone.conv1"]) for learner in learners]
    common = sorted(owned[0] & owned[1])
    assert common
    plain, penalised = (learner.backbone.conv1.weight.detach()[common] for learner in learners)
    torch.testing.assert_close(plain - penalised, 0.001 * start[common].sign())


def test_mean_activity_equals_a_hand_computation() -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(75, 4), nn.Tanh())
    network = se.continual.heads.TaskNetwork(backbone, nn.Linear(4, 2))
    data = TASKS[0].data
    graph = se.trace(network, data.example())
    activity = measure_activity(network, graph, data, torch.device("cpu"))
    x = torch.cat([inputs for inputs, _ in data.batches("train", 512)])
    hidden = F.relu(backbone[0](x))
    torch.testing.assert_close(activity["backbone.0"], hidden.abs().mean((0, 2, 3)))
    torch.testing.assert_close(activity["backbone.3"], backbone(x).abs().mean(0))


@pytest.mark.parametrize(
    ("backbone", "shape", "expected"),
    [("lenet5_backbone", (1, 8, 8), (50_550, 142, 165)), ("half_vgg11_backbone", (3, 8, 8), (2_304_864, 1_376, 2_499))],
)
def test_memory_equals_the_papers_tables(backbone: str, shape: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    """Tables 7 and 8, where the paper prints 164 for the 7 + 22 + 136 factors of LeNet-5."""
    floats, neurons, factors = expected
    tasks = 2
    network = getattr(se.zoo, backbone)()
    table = paper_memory(network, tasks)
    assert {row.backbone for row in table.values()} == {floats}
    assert table["naive"].bits(64) == floats * 64
    assert table["single"].bits(64) == floats * 64 * tasks
    for method in ("supsup", "pruning"):
        assert (table[method].factors, table[method].masks) == (0, floats * tasks)
    assert (table["batch-ensemble"].factors, table["batch-ensemble"].masks) == (factors * tasks, 0)
    assert (table["structured"].factors, table["structured"].masks) == (0, neurons * tasks)
    # And by the learners' own count.
    images = torch.zeros(8, *shape, dtype=torch.uint8)
    images[:, :, 0, 0] = torch.arange(0, 256, 32, dtype=torch.uint8)[:, None]
    sequence = se.continual.split_tasks(se.Data.from_arrays(images, torch.arange(8) % 4, validation=0.0), tasks)
    for method, learner_type in LEARNERS.items():
        row = {"selection": "random"} if method == "structured" else {}
        learner = learner_type(network, epochs=0, quiet=True, **row)
        for task in sequence:
            learner.learn(task)
        memory = learner.memory()
        assert (memory.backbone, memory.factors) == (floats, table[method].factors)
        assert memory.masks == (neurons * tasks if method == "pruning" else table[method].masks)
        assert memory.heads == sum(p.numel() for head in learner.heads.values() for p in head.parameters()) > 0
        assert memory.bytes() == math.ceil(memory.bits() / 8)


class Bare(nn.Module):
    """Read the neurons of a layer by a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(49, 8)
        self.weight = nn.Parameter(torch.randn(8, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x.flatten(1)).relu() @ self.weight).relu()


@pytest.mark.parametrize("method", LEARNERS)
def test_bare_parameters_of_a_backbone_are_trained(method: str) -> None:
    tasks = make_tasks(2)
    learner = LEARNERS[method](Bare(), **SHORT)
    learner.learn(tasks[0])
    before = logits_of(learner, tasks)[0]
    learner.learn(tasks[1])
    now = logits_of(learner, tasks)
    assert method == "naive" or torch.equal(now[0], before)
    assert now[1].shape == (len(inputs_of(tasks[1])), 2)

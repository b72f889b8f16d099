"""Splitting data into tasks; invalid tasks and learner arguments."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se
from structured_ensembles.continual import LEARNERS, PruningLearner, StructuredLearner, Task, load_tasks, split_tasks
from structured_ensembles.continual.tasks import make_task
from tests.support.continual_cases import SHORT, inputs_of, logits_of, make_backbone, make_tasks

TASKS = make_tasks()
pytestmark = pytest.mark.filterwarnings("ignore:task . gets no neuron")  # small backbones fill up


@pytest.mark.parametrize("shuffle_labels", [False, True])
def test_digits_are_split_into_five_tasks(shuffle_labels: bool) -> None:
    data = se.load_data("digits")
    tasks = load_tasks("digits", shuffle_labels=shuffle_labels, seed=3 if shuffle_labels else 0)
    assert [task.number for task in tasks] == [0, 1, 2, 3, 4]
    classes = [label for task in tasks for label in task.classes]
    assert sorted(classes) == list(range(10))
    assert (classes == list(range(10))) is not shuffle_labels
    for task in tasks:
        assert task.data.classes == tuple(str(label) for label in task.classes)
        for name in ("train", "test"):
            full_split, task_split = data.split(name), task.data.split(name)
            if shuffle_labels and name == "train":
                continue  # another seed holds out other samples
            expected = [
                (int(full_split.targets[index]), full_split.inputs[index])
                for index in full_split.index
                if int(full_split.targets[index]) in task.classes
            ]
            assert len(task_split) == len(expected)
            for (label, pixels), index in zip(expected, task_split.index, strict=True):
                assert task.classes[int(task_split.targets[index])] == label
                assert torch.equal(task_split.inputs[index], pixels)
        assert task.data.train.inputs.data_ptr() == tasks[0].data.train.inputs.data_ptr()  # not copied
    assert [str(task) for task in load_tasks("digits")][1] == "task 1: 2, 3"


def test_benchmarks_have_the_papers_numbers_of_tasks_and_classes() -> None:
    names = {"mnist": (5, 2), "cifar10": (5, 2), "cifar100": (10, 10), "tiny-imagenet": (10, 20), "digits": (5, 2)}
    for name, (tasks, classes) in names.items():
        info = se.data.sources.DATA_SETS[name]
        images = torch.zeros(info.num_classes, *info.shape, dtype=torch.uint8)
        labels = torch.arange(info.num_classes)
        data = se.Data.from_arrays(images, labels, validation=0.0, classes=info.num_classes)
        split = split_tasks(data, se.continual.tasks.BENCHMARKS[name].tasks)
        assert (len(split), {len(task.classes) for task in split}) == (tasks, {classes})


def test_streamed_data_are_split_into_tasks() -> None:
    """Batches have the sizes and order of the same data in memory."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(50, 3, generator=generator), torch.randint(0, 6, (50,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    streamed = split_tasks(se.Data.from_loaders(loader, test=loader, classes=6), 3)
    stored = split_tasks(se.Data.from_arrays(x, y, validation=0.0, classes=6), 3)
    for streamed_task, stored_task in zip(streamed, stored, strict=True):
        assert len(streamed_task.data.train) == len(stored_task.data.train)
        for size in (4, 7, 64):
            batches = [list(task.data.train.batches(size)) for task in (streamed_task, stored_task)]
            assert len(batches[0]) == len(batches[1]) == streamed_task.data.num_batches("train", size)
            for ours, theirs in zip(*batches, strict=True):
                assert torch.equal(ours[0], theirs[0])
                assert torch.equal(ours[1], theirs[1])


def test_learner_accepts_streamed_tasks() -> None:
    x = torch.rand(64, 1, 7, 7)
    loader = DataLoader(TensorDataset(x, torch.arange(64) % 4), batch_size=16)
    learner = StructuredLearner(make_backbone(), search_epochs=1, **SHORT)
    for task in split_tasks(se.Data.from_loaders(loader, classes=4), 2):
        learner.learn(task)
    assert learner.predict(x, task=1).shape == (64,)


def test_task_may_lack_validation_and_test_samples() -> None:
    x, y = torch.rand(40, 1, 7, 7), torch.arange(40) % 4
    few = y < 2
    data = se.Data.from_arrays(x, y, validation=(x[few], y[few]), test=(x[few], y[few]))
    first, second = split_tasks(data, 2)
    assert len(first.data.split("validation")) == len(first.data.split("test")) == 20
    assert second.data.validation is second.data.test is None
    for learner_type in (StructuredLearner, PruningLearner):
        learner = learner_type(make_backbone(), **SHORT)
        learner.learn(second)
        assert learner.predict(x, task=1).shape == (40,)
    with pytest.raises(ValueError, match="no test split"):
        se.continual.run_sequence(learner, [first, second])


@pytest.mark.parametrize("method", LEARNERS)
def test_learner_accepts_tabular_data_in_float64(method: str, tmp_path: Path) -> None:
    """Neither images nor float32."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(80, 5, generator=generator), torch.arange(80) % 4
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU()).double()
    learner = LEARNERS[method](backbone, **SHORT)
    for task in split_tasks(se.Data.from_arrays(x, y), 2):
        learner.learn(task)
    assert learner.logits(x, 1).dtype == torch.float64
    learner.save(tmp_path / "learner.safetensors")
    same = LEARNERS[method].load(tmp_path / "learner.safetensors", backbone=nn.Sequential(*backbone).float())
    assert torch.equal(learner.logits(x, 0), same.logits(x, 0))


def test_invalid_splits_are_errors() -> None:
    data = se.load_data("digits")
    with pytest.raises(ValueError, match=r"divide the 10 classes: one of \[1, 2, 5, 10\], not 3"):
        split_tasks(data, 3)
    for tasks in (0, True):
        with pytest.raises(ValueError, match=f"not {tasks}"):
            split_tasks(data, tasks)
    with pytest.raises(ValueError, match="regression has no classes"):
        split_tasks(se.Data.from_arrays(torch.rand(8, 3), torch.rand(8)), 2)
    with pytest.raises(ValueError, match="tasks must be given for 'svhn'"):
        load_tasks("svhn")
    with pytest.raises(ValueError, match=r"tasks must divide the 10 classes: .*, not 0"):
        load_tasks("digits", tasks=0)


@pytest.mark.parametrize("method", LEARNERS)
def test_invalid_task_is_refused_and_leaves_the_learner_unchanged(method: str) -> None:
    learner = LEARNERS[method](make_backbone(), **SHORT)
    with pytest.raises(ValueError, match="learned \\(none yet\\), not 0"):
        learner.predict(inputs_of(TASKS[0]), task=0)
    with pytest.raises(ValueError, match="no task has been learned"):
        learner.infer_task(inputs_of(TASKS[0]))
    learner.learn(TASKS[0])
    before, memory = logits_of(learner, TASKS), learner.memory()
    beyond = dataclasses.replace(TASKS[1].data.train, targets=TASKS[1].data.train.targets + 1)
    larger = make_tasks(size=9)[1]
    broken = dataclasses.replace(TASKS[1].data, normalization=se.Normalization((0.0,), (0.0,)))  # divides by zero
    bad = {
        r"task must be new, but 0 has been learned already": TASKS[0],
        r"the train labels of task 1 must be labels from 0 to 1, but reach from 1 to 2": dataclasses.replace(
            TASKS[1], data=dataclasses.replace(TASKS[1].data, train=beyond)
        ),
        r"task 1 has inputs of shape \(1, 9, 9\), but the learner has learned on \(1, 7, 7\)": larger,
        r"must be a classification": Task(1, (0,), se.Data.from_arrays(torch.rand(8, 1, 7, 7), torch.rand(8))),
        r"as many classes as its data, 2, not \(2, 3, 4\)": dataclasses.replace(TASKS[1], classes=(2, 3, 4)),
        r"at least 0, not -1": dataclasses.replace(TASKS[1], number=-1),
        r"loss became|saliency is not finite": dataclasses.replace(TASKS[1], data=broken),
    }
    for message, task in bad.items():
        with pytest.raises((ValueError, FloatingPointError), match=message):
            learner.learn(task)
        assert list(learner.learned) == [0]
        assert learner.memory() == memory
        assert torch.equal(before[0], learner.logits(inputs_of(TASKS[0]), 0))
    with pytest.raises(TypeError, match="must be a Data, or a Task"):
        learner.learn(TASKS[1].data.train)
    with pytest.raises(TypeError, match=r"task\.data must be a Data, not a tuple"):
        learner.learn(dataclasses.replace(TASKS[1], data=(inputs_of(TASKS[1]), torch.zeros(8))))
    with pytest.raises(ValueError, match="with whole numbers as labels"):
        learner.learn(se.Data.from_arrays(torch.rand(20, 3), torch.arange(20.0) % 2, task="regression"))
    with pytest.raises(ValueError, match=r"learned \(0\), not 7"):
        learner.logits(inputs_of(TASKS[0]), task=7)
    learner.learn(TASKS[1])  # and it can still learn


def test_invalid_learner_arguments_are_errors() -> None:
    backbone = make_backbone()
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        StructuredLearner("lenet5")
    for arguments, message in (
        ({"prune": 1.0}, "prune must be at least 0 and less than 1"),
        ({"scope": "block"}, "scope must be one of 'layer', 'network'"),
        ({"extraction": "firm"}, "extraction must be one of 'hard', 'soft'"),
        ({"head": "deep"}, "head must be one of 'linear', 'paper'"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of"),
        ({"selection": "mirrored"}, "selection must be one of 'learned', 'random', 'magnitude', not 'mirrored'"),
        ({"search_epochs": -1}, "search_epochs must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            StructuredLearner(backbone, **arguments)
    for keep in (0, 1.5, "half"):
        with pytest.raises(ValueError, match="keep must be"):
            LEARNERS["supsup"](backbone, keep=keep)
    with pytest.raises(ValueError, match=r"pooled features \(batch, features\), but gives \(2, 8, 7, 7\)"):
        StructuredLearner(backbone.conv1, **SHORT).learn(TASKS[0])
    with pytest.raises(ValueError, match=r"backbone cannot take inputs of shape \(1, 7, 7\)"):
        StructuredLearner(se.zoo.half_vgg11_backbone(), **SHORT).learn(TASKS[0])
    kept = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    StructuredLearner(backbone, search_epochs=1, **SHORT).learn(TASKS[0])
    assert all(torch.equal(kept[name], tensor) for name, tensor in backbone.state_dict().items())
    assert all(parameter.requires_grad for parameter in backbone.parameters())


def test_papers_head_has_the_papers_size_and_keeps_earlier_logits() -> None:
    """49 copies of every feature and two hidden layers: 98 million parameters on a half-VGG11."""
    with torch.device("meta"):
        head = se.continual.heads.PaperHead(256, 2)
    assert sum(p.numel() for p in head.parameters()) == (12544 + 1) * 6272 + (6272 + 1) * 3136 + (3136 + 1) * 2
    learner = StructuredLearner(make_backbone(), search_epochs=1, head="paper", **SHORT)
    for task in TASKS[:3]:
        before = logits_of(learner, TASKS)
        learner.learn(task)
        assert all(torch.equal(before[number], learner.logits(inputs_of(TASKS[number]), number)) for number in before)
    assert learner.heads[0].layers[0].in_features == 49 * 8  # of half the features
    assert set(learner.capacity().sizes) == {"backbone.conv1", "backbone.conv2"}


@pytest.mark.parametrize("streamed", [False, True])
def test_learn_takes_data_whose_classes_are_those_of_its_labels(streamed: bool) -> None:
    digits = se.load_data("digits")
    chosen = torch.isin(digits.train.targets[digits.train.index], torch.tensor([7, 3]))
    index = digits.train.index[chosen][:40]
    inputs, targets = digits.train.inputs[index], digits.train.targets[index]
    if streamed:
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
        data = se.Data.from_loaders(loader, classes=10)
    else:
        train = dataclasses.replace(digits.train, index=index)
        data = dataclasses.replace(digits, train=train, validation=None, test=None)
    learner = StructuredLearner(se.zoo.lenet5_backbone(in_channels=1), epochs=1, search_epochs=0, quiet=True)
    learner.learn(data)
    learner.learn(data)
    assert list(learner.learned) == [0, 1]  # numbers follow
    assert learner.learned[1].classes == (3, 7)
    assert learner.learned[1].names == ("3", "7")
    assert learner.logits(inputs, task=0).shape == (40, 2)
    task = make_task(data, 5)
    assert [int(targets_in.max()) for _, targets_in in task.data.train.batches(40)] == [1]
    assert sum(int((y == 1).sum()) for _, y in task.data.train.batches(40)) == int((targets == 7).sum())


def test_data_with_all_classes_are_a_task_as_they_are() -> None:
    digits = se.load_data("digits")
    assert make_task(digits, 2).data is digits
    assert make_task(digits, 2).classes == tuple(range(10))
    with pytest.raises(ValueError, match="must be a classification"):
        make_task(se.Data.from_arrays(torch.rand(20, 3), torch.rand(20)), 0)
    with pytest.raises(TypeError, match="task must be a Data, or a Task"):
        StructuredLearner(se.zoo.lenet5_backbone()).learn([1, 2])
